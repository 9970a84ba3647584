// The page: a conversation, the settings of the next answer, the figures of the last one.

import { EXAMPLES, fieldsOf } from "./form.js";
import { Lane } from "./lane.js";
import { Failure, ask, describe } from "./wire.js";

const RETRY_MS = 1500;
const KEY = "jaxspec-key";
const at = (id) => document.getElementById(id);
const [log, prompt, notice] = [at("log"), at("prompt"), at("notice")];

const conversation = [];
let server = null;
let running = null;
let isWaiting = false;
let isWatching = false;
let hasAsked = false;

// ---- The state of the server.

async function connect() {
  server = await describe();
  at("model").textContent = server.model;
  document.title = `${server.model} · jaxspec`;
  at("access").hidden = !server.needs_key;
  const maxDrafts = server.max_draft_tokens;
  const k = at("k");
  const isNew = k.max === "0";
  k.max = maxDrafts;
  if (isNew || Number(k.value) > maxDrafts) k.value = maxDrafts;
  k.disabled = at("race").disabled = !maxDrafts;
  at("max-tokens").max = server.max_model_len - 1;
  showSettings();
  showMemory(server);
  watch();
}

/** Shows the server's state until all programs are compiled and no answer runs. */
async function watch() {
  showServer();
  if (isWatching) return;
  isWatching = true;
  try {
    while (server.num_warming || running) {
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      server = await describe();
      showServer();
    }
  } catch {
    // `waitForServer` reconnects and watches again.
    server.num_warming = 0;
    showServer();
  }
  isWatching = false;
}

function showServer() {
  showWarming();
  // Before this page's first request, K would be that of other clients' requests.
  at("choice").hidden = !server.max_draft_tokens || !hasAsked;
  at("choice").textContent = `K now ${server.num_drafts}${reason(server)}`;
}

/** Why the server has chosen K, as far as it is known. */
function reason({ num_drafts: k, gain, may_draft: mayDraft }) {
  if (!mayDraft) return ": drafts are switched off";
  if (!k) return ": plain decoding is faster";
  if (gain === null) return "";
  const share = Math.round(100 * gain);
  return `: ${share < 0 ? "−" : "+"}${Math.abs(share)} %`;
}

function showWarming() {
  const { compiling, is_ready: isReady, num_warming: left } = server;
  const effect = isReady ? "answers may be slower until it is done" : "answers wait for it";
  at("warming").hidden = !left;
  at("warming").textContent = left ? `Compiling ${compiling ?? ""} (${left} left): ${effect}.` : "";
}

/** Shows the memory plan of a device, if the server has one. */
function showMemory({ memory }) {
  const shown = at("memory");
  shown.hidden = !memory;
  if (!memory) return;
  const length = memory.max_model_len.toLocaleString("en");
  const concurrency = memory.max_concurrency.toFixed(1);
  shown.querySelector("summary").textContent = `Memory: ${concurrency} × ${length} tokens`;
  shown.title = memory.table;
  const rows = Object.entries(memory.shown).map(([name, size]) => {
    const row = document.createElement("div");
    row.appendChild(document.createElement("dt")).textContent = name;
    row.appendChild(document.createElement("dd")).textContent = size;
    return row;
  });
  shown.querySelector("dl").replaceChildren(...rows);
  const notes = [`${memory.remarks.KV}.`, ...memory.notes].map((text) => {
    const note = document.createElement("p");
    note.textContent = text;
    return note;
  });
  shown.querySelector("div.notes").replaceChildren(...notes);
}

/** Shows that the server cannot be reached, and retries until it can. */
async function waitForServer() {
  if (isWaiting) return;
  isWaiting = true;
  show("The server does not answer. This page waits for it.", true);
  for (;;) {
    try {
      await connect();
      break;
    } catch {
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
  isWaiting = false;
  show("The server is back.");
}

function show(text, isBad = false) {
  notice.textContent = text;
  notice.classList.toggle("bad", isBad);
  notice.hidden = !text;
}

// ---- A question and its answer.

async function send(text) {
  if (running || !text.trim()) return;
  at("intro").hidden = hasAsked = true;
  if (!isWaiting) show("");
  const turn = log.appendChild(document.createElement("article"));
  const question = turn.appendChild(document.createElement("p"));
  question.className = "question";
  question.textContent = text;
  const lanes = turn.appendChild(document.createElement("div"));
  lanes.className = "lanes";
  turn.scrollIntoView({ block: "end" });
  running = new AbortController();
  setRunning(true);
  if (server) watch();
  try {
    const asked = body(text);
    const isRace = at("race").checked && asked.num_speculative_tokens > 0;
    if (isRace) asked.seed = Math.floor(Math.random() * 2 ** 31);
    await answer(lanes, asked, isRace);
  } catch (error) {
    fail(turn, text, error);
  } finally {
    running = null;
    setRunning(false);
  }
}

function body(text) {
  const asked = {
    messages: [...conversation, { role: "user", content: text }],
    max_tokens: at("max-tokens").valueAsNumber || 1,
    temperature: at("temperature").valueAsNumber,
    stream: true,
    include_metrics: true,
    return_token_origins: true,
    ...fieldsOf(at("schema").value),
  };
  if (server?.max_draft_tokens) asked.num_speculative_tokens = at("k").valueAsNumber;
  return asked;
}

/** Runs one lane, or two one after the other: concurrently they would slow each other. */
async function answer(lanes, asked, isRace) {
  lanes.classList.toggle("race", isRace);
  const k = asked.num_speculative_tokens ?? 0;
  const limit = `at most ${k} drafts`;
  const drafted = new Lane(isRace ? `With ${limit}` : k ? `A${limit.slice(1)}` : "Plain");
  lanes.append(drafted.element);
  const plain = isRace ? new Lane("Without drafts") : null;
  if (plain) {
    lanes.append(plain.element);
    plain.foot.textContent = "Starts when the other has ended.";
  }
  try {
    await run(drafted, asked, true);
  } finally {
    if (drafted.text) {
      conversation.push(asked.messages.at(-1));
      conversation.push(drafted.message);
    }
    if (plain && !drafted.isWhole) plain.foot.textContent = "Did not start.";
  }
  if (plain && drafted.isWhole) {
    plain.foot.textContent = "";
    await run(plain, { ...asked, num_speculative_tokens: 0 }, false);
    if (plain.isWhole) compare(drafted, plain);
  }
  if (drafted.isWhole) say(`The answer is complete. ${drafted.spoken}`);
}

async function run(lane, asked, isShown) {
  const k = asked.num_speculative_tokens ?? 0;
  lane.begun = performance.now();
  lane.element.classList.add("running");
  lane.element.scrollIntoView({ block: "nearest" });
  const { signal } = running;
  let reason = null;
  const follow = (change) => {
    const isFollowed = bottomOf(lane.element) < floor() + 60;
    change();
    // Not "nearest", which shows the top of an element that is taller than the view.
    const isBelow = bottomOf(lane.element) > floor();
    if (isFollowed && isBelow) lane.element.scrollIntoView({ block: "end" });
  };
  try {
    for await (const chunk of ask(asked, { key: sessionStorage.getItem(KEY), signal })) {
      // The last chunk has the metrics and no choice.
      const [choice] = chunk.choices;
      reason = choice?.finish_reason ?? reason;
      follow(() => {
        if (choice) lane.add(choice);
        if (chunk.metrics) lane.finish(chunk.metrics);
        if (isShown) showFigures(lane, k);
      });
    }
    if (reason) {
      follow(() => {
        end(lane, reason);
        lane.showDrafts(k);
      });
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    lane.foot.textContent = `Stopped after ${lane.numTokens} tokens.`;
    say("Stopped.");
  } finally {
    lane.element.classList.remove("running");
  }
}

function end(lane, reason) {
  const why = { length: "cut at max tokens", abort: "ended by the server" }[reason];
  lane.isWhole = reason !== "abort";
  lane.showForm();
  const parts = [`${lane.numTokens} tokens`, `${lane.seconds.toFixed(2)} s`];
  const first = lane.metrics?.time_to_first_token_ms;
  if (first) parts.push(`the first after ${Math.round(first)} ms`);
  if (why) parts.push(why);
  if (lane.pause) parts.push(`${lane.pause.toFixed(1)} s of it in one pause`);
  lane.foot.textContent = parts.join(" · ");
}

function compare(drafted, plain) {
  const isSame = drafted.ids.join() === plain.ids.join();
  // An answer that waited for a compile would make the ratio meaningless.
  const isFair = drafted.speed && plain.speed && !drafted.pause && !plain.pause;
  const times = isFair ? `${(drafted.speed / plain.speed).toFixed(2)}×` : "ask again";
  drafted.speedShown.textContent += ` · ${times}`;
  const done = plain.tokensAfter(drafted.seconds);
  plain.foot.textContent += ` · ${done} of ${plain.numTokens} when the other was done`;
  plain.foot.textContent += isSame ? " · the same text" : " · another text";
}

function fail(turn, text, error) {
  if (!(error instanceof Failure)) console.error(error);
  const box = turn.appendChild(document.createElement("div"));
  box.className = "error";
  box.setAttribute("role", "alert");
  box.appendChild(document.createElement("p")).textContent = error.message;
  const again = box.appendChild(document.createElement("button"));
  again.type = "button";
  again.className = "quiet";
  again.textContent = "Ask again";
  again.addEventListener("click", () => send(text));
  box.scrollIntoView({ block: "nearest" });
  if (error.isGone) waitForServer();
  if (error.status === 401) {
    at("access").hidden = false;
    at("key").focus();
  }
}

// ---- Display.

function setRunning(isRunning) {
  const focused = document.activeElement;
  at("send").hidden = isRunning;
  at("stop").hidden = !isRunning;
  // A hidden element cannot keep the focus.
  if (!focused.checkVisibility()) prompt.focus();
}

function say(text) {
  at("spoken").textContent = text;
}

const bottomOf = (element) => element.getBoundingClientRect().bottom;
/** The bottom of the view, above the composer. */
const floor = () => at("composer").getBoundingClientRect().top;
const percent = (share) => `${Math.round(100 * share)} %`;

function showFigures(lane, k) {
  const found = lane.acceptance(k);
  const format = (value, write) => (value === null || value === undefined ? "–" : write(value));
  at("speed").textContent = format(lane.speed, Math.round);
  at("rate").textContent = format(found?.rate, percent);
  at("length").textContent = format(found?.length, (value) => value.toFixed(2));
  at("drafts").textContent = format(found?.drafts, (value) => value.toFixed(2));
  for (const [origin, count] of Object.entries(lane.counts)) {
    document.querySelector(`[data-count=${origin}]`).textContent = count || "";
  }
  const bars = (found?.shares ?? []).map((share, position) => {
    const bar = document.createElement("li");
    bar.style.setProperty("--share", share ?? 0);
    bar.appendChild(document.createElement("b")).textContent = format(share, percent);
    bar.appendChild(document.createElement("span")).textContent = position + 1;
    return bar;
  });
  at("positions").replaceChildren(...bars);
}

function showSettings() {
  for (const output of document.querySelectorAll("output")) {
    output.textContent = at(output.htmlFor.value).value;
  }
}

// ---- User input.

// In the one-column layout the composer covers the end of the page by its height.
new ResizeObserver(([{ target }]) => {
  document.documentElement.style.setProperty("--composer", `${target.offsetHeight}px`);
}).observe(at("composer"));
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || !prompt.value.trim()) return;
  const text = prompt.value;
  prompt.value = "";
  send(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("settings").addEventListener("input", showSettings);
at("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  for (const turn of log.querySelectorAll("article")) turn.remove();
  at("intro").hidden = false;
  showFigures(new Lane(""), 0);
  prompt.focus();
});
at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  show("The key is used from now on.");
  prompt.focus();
});
for (const example of document.querySelectorAll("#examples button")) {
  example.addEventListener("click", () => send(example.textContent));
}
for (const [name, example] of Object.entries(EXAMPLES)) {
  at(`example-${name}`).addEventListener("click", () => {
    at("schema").value = JSON.stringify(example, null, 2);
    at("schema").focus();
  });
}
at("key").value = sessionStorage.getItem(KEY) ?? "";
connect().catch(waitForServer);
