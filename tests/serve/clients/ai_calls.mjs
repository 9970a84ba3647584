// What Vercel's AI SDK asks: `node ai_calls.mjs URL chat`.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, call] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "jaxspec",
  baseURL: `${url}/v1`,
  apiKey: "secret",
  supportsStructuredOutputs: true,
});
const asked = { model: provider("model"), prompt: "Is it warm in Oslo?", maxRetries: 0 };
const city = z.string();

const calls = {
  chat: async () => ({ text: (await generateText(asked)).text }),
  stream: async () => {
    let text = "";
    for await (const part of streamText(asked).textStream) {
      text += part;
    }
    return { text };
  },
  system: async () => ({
    text: (await generateText({ ...asked, system: "Be brief." })).text,
  }),
  tools: async () => {
    const weather = tool({ inputSchema: z.object({ city }) });
    const given = { tools: { weather }, toolChoice: "required" };
    const made = (await generateText({ ...asked, ...given })).toolCalls;
    return { calls: made.map((one) => [one.toolName, one.input]) };
  },
  structured: async () => {
    const schema = z.object({ city, degrees: z.number().int() });
    return { object: (await generateObject({ ...asked, schema })).object };
  },
};

console.log(JSON.stringify(await calls[call]()));
