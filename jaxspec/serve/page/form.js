// Answers with a form, JSON and calls of tools: how one is asked for, and shown to be read.

import { Failure } from "./wire.js";

// What bounds nothing may go on until max tokens, with a model that knows nothing.
const string = { type: "string", maxLength: 40 };

export const EXAMPLES = {
  schema: {
    type: "object",
    properties: { name: string, age: { type: "integer", minimum: 0, maximum: 120 } },
    required: ["name", "age"],
    additionalProperties: false,
  },
  tools: [
    {
      name: "weather",
      parameters: {
        type: "object",
        properties: { city: string },
        required: ["city"],
        additionalProperties: false,
      },
    },
  ],
};

/** The fields of a request that give an answer the form that somebody has written. */
export function fieldsOf(text) {
  if (!text.trim()) return {};
  const wanted = parse(text);
  if (Array.isArray(wanted)) {
    const tools = wanted.map((one) => (one?.function ? one : { type: "function", function: one }));
    return { tools, tool_choice: "required" };
  }
  if (wanted === null || typeof wanted !== "object") {
    throw new Failure("JSON or tools: this is neither a schema, { … }, nor a list of tools, [ … ].");
  }
  const json_schema = { name: "answer", schema: wanted };
  return { response_format: { type: "json_schema", json_schema } };
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Failure(`JSON or tools: ${error.message}.`);
  }
}

/** Adds what a chunk tells of calls to those there are. */
export function addCalls(calls, deltas) {
  for (const { index, id, function: told } of deltas) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += told?.name ?? "";
    calls[index].function.arguments += told?.arguments ?? "";
  }
}

/** What an answer says to whoever goes on from it; a call that was cut off is none. */
export function messageOf(text, calls) {
  const areWhole = calls.every(({ function: { arguments: given } }) => indented(given) !== null);
  if (!calls.length || !areWhole) return { role: "assistant", content: text };
  return { role: "assistant", content: null, tool_calls: calls };
}

/** The answer in words, for whoever hears it. */
export function spoken(text, calls) {
  const told = calls.map(({ function: { name, arguments: given } }) => `Calls ${name} with ${given}.`);
  return told.join(" ") || text;
}

/** Elements that show the calls, or the text if it is JSON; none for other texts. */
export function readable(text, calls) {
  if (calls.length) {
    return calls.map(({ function: { name, arguments: given } }) =>
      card(`Calls ${name}`, indented(given) ?? given),
    );
  }
  const shown = /^\s*[[{]/.test(text) ? indented(text) : null;
  return shown === null ? [] : [card("JSON", shown)];
}

/** A line for every entry; null of what is no JSON, as a text that was cut off. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

function card(title, text) {
  const shown = document.createElement("figure");
  shown.appendChild(document.createElement("figcaption")).textContent = title;
  shown.appendChild(document.createElement("pre")).textContent = text;
  return shown;
}
