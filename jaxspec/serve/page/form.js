// Structured outputs, JSON and tool calls: their request fields, and how they are shown.

import { Failure } from "./wire.js";

// Bounded: a small model may fill an unbounded string until max tokens.
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

/** The request fields for a schema or a list of tools that the user has entered. */
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

/** Adds a chunk's deltas to the calls. */
export function addCalls(calls, deltas) {
  for (const { index, id, function: added } of deltas) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += added?.name ?? "";
    calls[index].function.arguments += added?.arguments ?? "";
  }
}

/** The answer as a message of the next request; a call that was cut off counts as text. */
export function messageOf(text, calls) {
  const areWhole = calls.every(({ function: { arguments: given } }) => indented(given) !== null);
  if (!calls.length || !areWhole) return { role: "assistant", content: text };
  return { role: "assistant", content: null, tool_calls: calls };
}

/** The answer for screen readers. */
export function spoken(text, calls) {
  const lines = calls.map(({ function: { name, arguments: given } }) => `Calls ${name} with ${given}.`);
  return lines.join(" ") || text;
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

/** The JSON with one line per entry; null if the text is not JSON, as when cut off. */
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
