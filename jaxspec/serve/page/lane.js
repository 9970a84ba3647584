// One answer as it comes: its tokens on the page, and what they tell of the drafts.

import { addCalls, messageOf, readable, spoken } from "./form.js";

const OWN = new Set(["recovered", "bonus"]);

/** A column of the conversation, with its text and its figures. */
export class Lane {
  constructor(title) {
    this.element = document.createElement("section");
    this.element.className = "lane";
    this.element.setAttribute("aria-label", title);
    const head = this.element.appendChild(document.createElement("p"));
    head.className = "head";
    this.titleShown = head.appendChild(document.createElement("span"));
    this.titleShown.textContent = title;
    this.speedShown = head.appendChild(document.createElement("b"));
    this.words = this.element.appendChild(document.createElement("p"));
    this.words.className = "words";
    this.form = this.element.appendChild(document.createElement("div"));
    this.form.className = "form";
    this.foot = this.element.appendChild(document.createElement("p"));
    this.foot.className = "foot";
    this.counts = { draft: 0, leaf: 0, recovered: 0, bonus: 0, target: 0 };
    this.ids = [];
    this.text = "";
    this.calls = [];
    this.histogram = [];
    this.kept = 0;
    this.reach = 0;
    this.metrics = null;
    this.begun = performance.now();
    this.arrivals = [];
    this.isWhole = false;
  }

  get numTokens() {
    return this.ids.length;
  }

  /** Adds a choice of a chunk: one element per token. */
  add(choice) {
    const tokens = choice.token_origins ?? [];
    const added = document.createDocumentFragment();
    for (const { text, origin, token_id } of tokens) {
      const span = added.appendChild(document.createElement("span"));
      span.className = "token";
      span.dataset.origin = origin;
      span.textContent = text;
      this.text += text;
      this.ids.push(token_id);
      this.counts[origin] += 1;
      this.count(origin);
    }
    this.words.append(added);
    addCalls(this.calls, choice.delta?.tool_calls ?? []);
    if (tokens.length) {
      const time = performance.now() - this.begun;
      this.arrivals.push({ time, count: this.numTokens });
    }
    this.showSpeed();
  }

  /** Every token that is the target's own after drafts ends a round of them. */
  count(origin) {
    // A correction takes the place of a draft: that position was tried as well.
    if (OWN.has(origin)) {
      this.reach = Math.max(this.reach, this.kept + (origin === "recovered"));
    }
    if (OWN.has(origin)) this.histogram[this.kept] = (this.histogram[this.kept] ?? 0) + 1;
    // Positions are those of the chain: a draft from beside it has none.
    if (origin === "leaf") return;
    this.kept = origin === "draft" ? this.kept + 1 : 0;
  }

  /** Takes the server's own counts and times, which come with the last chunk. */
  finish(metrics) {
    this.metrics = metrics;
    this.showSpeed();
  }

  /** Adds to the title how many drafts the rounds had: the server chooses at most k. */
  showDrafts(k) {
    if (!k || !this.metrics) return;
    const found = this.acceptance(k);
    const told = found?.drafts ? `K = ${found.drafts.toFixed(1)}` : "K = 0, no drafts";
    this.titleShown.textContent += ` · ${told}`;
  }

  /** Shows an answer that has a form once more, to be read. */
  showForm() {
    this.form.replaceChildren(...readable(this.text, this.calls));
  }

  /** The answer, for the next question. */
  get message() {
    return messageOf(this.text, this.calls);
  }

  /** The answer in words. */
  get spoken() {
    return spoken(this.text, this.calls);
  }

  /** Tokens per second after the first: the server's, or as they arrive here. */
  get speed() {
    const told = this.metrics?.tokens_per_second;
    if (told) return told;
    const first = this.arrivals[0];
    const last = this.arrivals.at(-1);
    if (!first || last.time <= first.time) return null;
    return (1000 * (last.count - first.count)) / (last.time - first.time);
  }

  showSpeed() {
    this.speedShown.textContent = this.speed ? `${Math.round(this.speed)} tokens/s` : "";
  }

  /** Seconds from the question to the last token. */
  get seconds() {
    return (this.arrivals.at(-1)?.time ?? 0) / 1000;
  }

  /** Seconds of a gap that took most of the time, as for compiling; 0 without one. */
  get pause() {
    const times = [0, ...this.arrivals.map(({ time }) => time / 1000)];
    const longest = Math.max(...times.map((time, i) => time - (times[i - 1] ?? 0)));
    return longest > 1 && longest > this.seconds / 3 ? longest : 0;
  }

  /** How many tokens there were after some seconds. */
  tokensAfter(seconds) {
    return this.arrivals.findLast(({ time }) => time / 1000 <= seconds)?.count ?? 0;
  }

  /** What the drafts were good for, as far as it is known. */
  acceptance(k) {
    const told = this.metrics?.speculative_decoding;
    const histogram = told?.acceptance_histogram ?? this.histogram;
    const steps = histogram.reduce((sum, count) => sum + (count ?? 0), 0);
    if (!steps) return null;
    const kept = histogram.reduce((sum, count, i) => sum + i * (count ?? 0), 0);
    // Before the server tells, a position counts as tried where a draft has met it.
    const tried = told?.num_proposed_per_position;
    const shares = Array.from({ length: k }, (_, position) => {
      const count = tried ? tried[position] : position < this.reach ? steps : 0;
      if (!count) return null;
      const reached = histogram.slice(position + 1);
      return reached.reduce((sum, count) => sum + (count ?? 0), 0) / count;
    });
    const drafts = told?.num_draft_tokens;
    return {
      shares,
      length: 1 + kept / steps,
      drafts: drafts ? drafts / steps : null,
      rate: drafts ? kept / drafts : null,
    };
  }
}
