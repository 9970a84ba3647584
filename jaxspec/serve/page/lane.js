// One answer as it streams in: its tokens on the page, and its acceptance.

import { addCalls, messageOf, readable, spoken } from "./form.js";

const OWN = new Set(["recovered", "bonus"]);

/** A column of the conversation with one answer and its figures. */
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
    // Accepted tokens of the current round; positions that any round has tried.
    this.accepted = 0;
    this.numTried = 0;
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

  /** Counts a token by position; a recovered or bonus token ends a round. */
  count(origin) {
    // A recovered token replaces a draft token, whose position was tried too.
    if (OWN.has(origin)) {
      this.numTried = Math.max(this.numTried, this.accepted + (origin === "recovered"));
      this.histogram[this.accepted] = (this.histogram[this.accepted] ?? 0) + 1;
    }
    // Positions are those of the main chain; a leaf is not on it.
    if (origin === "leaf") return;
    this.accepted = origin === "draft" ? this.accepted + 1 : 0;
  }

  /** Stores the server's own counts and times, which come with the last chunk. */
  finish(metrics) {
    this.metrics = metrics;
    this.showSpeed();
  }

  /** Adds the mean number of drafts per round to the title; the server chooses it, up to k. */
  showDrafts(k) {
    if (!k || !this.metrics) return;
    const found = this.acceptance(k);
    const mean = found?.drafts ? `K = ${found.drafts.toFixed(1)}` : "K = 0, no drafts";
    this.titleShown.textContent += ` · ${mean}`;
  }

  /** Shows JSON and calls again in a readable layout. */
  showForm() {
    this.form.replaceChildren(...readable(this.text, this.calls));
  }

  /** The answer as a message of the next request. */
  get message() {
    return messageOf(this.text, this.calls);
  }

  /** The answer for screen readers. */
  get spoken() {
    return spoken(this.text, this.calls);
  }

  /** Tokens per second after the first: measured by the server, or else by arrival. */
  get speed() {
    const betweenTokens = this.metrics?.mean_itl_ms;
    if (betweenTokens) return 1000 / betweenTokens;
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

  /** Seconds of the longest gap if over 1 s and a third of the time, as for a compile; else 0. */
  get pause() {
    const times = [0, ...this.arrivals.map(({ time }) => time / 1000)];
    const longest = Math.max(...times.map((time, i) => time - (times[i - 1] ?? 0)));
    return longest > 1 && longest > this.seconds / 3 ? longest : 0;
  }

  /** The number of tokens after some seconds. */
  tokensAfter(seconds) {
    return this.arrivals.findLast(({ time }) => time / 1000 <= seconds)?.count ?? 0;
  }

  /** Acceptance of the drafts so far, by position and in total; null before the first round. */
  acceptance(k) {
    const measured = this.metrics?.speculative_decoding;
    const histogram = measured?.acceptance_histogram ?? this.histogram;
    const steps = histogram.reduce((sum, count) => sum + (count ?? 0), 0);
    if (!steps) return null;
    const accepted = histogram.reduce((sum, count, i) => sum + i * (count ?? 0), 0);
    // Without the server's counts, a position that any round has tried counts in all rounds.
    const tried = measured?.num_proposed_per_position;
    const shares = Array.from({ length: k }, (_, position) => {
      const count = tried ? tried[position] : position < this.numTried ? steps : 0;
      if (!count) return null;
      const reached = histogram.slice(position + 1);
      return reached.reduce((sum, count) => sum + (count ?? 0), 0) / count;
    });
    const drafts = measured?.num_draft_tokens;
    return {
      shares,
      length: 1 + accepted / steps,
      drafts: drafts ? drafts / steps : null,
      rate: drafts ? accepted / drafts : null,
    };
  }
}
