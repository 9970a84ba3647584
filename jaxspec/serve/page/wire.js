// Requests to the server, their event streams, and errors.

/** An error with a message for the user; `isGone` if the server could not be reached. */
export class Failure extends Error {
  constructor(message, { isGone = false, status = 0 } = {}) {
    super(message);
    this.isGone = isGone;
    this.status = status;
  }
}

/** Sends a chat request and yields the events of its stream. */
export async function* ask(body, { key, signal }) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const request = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await reach("v1/chat/completions", request);
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await next(reader);
    if (done) throw cut();
    const events = (waiting + value).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) {
        throw new Failure(chunk.error.message, { status: chunk.error.code });
      }
      yield chunk;
    }
  }
}

/** The state of the server. */
export async function describe() {
  const response = await reach("page/server.json", { cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

async function reach(path, request) {
  try {
    return await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer.", { isGone: true });
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw cut();
  }
}

function cut() {
  return new Failure("The connection ended before the answer did.", { isGone: true });
}

async function refusal(response) {
  const { status } = response;
  let message = `The server answered with status ${status}.`;
  try {
    const { error } = await response.json();
    if (error) message = error.message ?? String(error);
  } catch {
    // Not JSON: the response is a proxy's.
  }
  if (status === 401) message = "The server requires an API key, and this one is not valid.";
  const wait = response.headers.get("retry-after");
  if (wait) message += ` Retry after ${wait} s.`;
  return new Failure(message, { status });
}
