// What openai's client for JavaScript asks: `node openai_calls.mjs URL chat`.

import OpenAI from "openai";

const [url, call] = process.argv.slice(2);
const access = { baseURL: `${url}/v1`, apiKey: "secret", maxRetries: 0 };
const chats = new OpenAI(access).chat.completions;
const asked = [{ role: "user", content: "Is it warm in Oslo?" }];
const instructed = [{ role: "system", content: "Be brief." }, ...asked];
const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});
const city = { city: { type: "string" } };
const create = (given) => chats.create({ model: "model", messages: asked, ...given });

const calls = {
  chat: async () => ({ text: (await create({})).choices[0].message.content }),
  stream: async () => {
    let text = "";
    for await (const chunk of await create({ stream: true })) {
      text += chunk.choices[0].delta.content ?? "";
    }
    return { text };
  },
  system: async () => {
    const answer = await create({ messages: instructed });
    return { text: answer.choices[0].message.content };
  },
  tools: async () => {
    const parameters = object(city);
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const answer = await create({ tools, tool_choice: "required" });
    const made = answer.choices[0].message.tool_calls.map((one) => one.function);
    return { calls: made.map((one) => [one.name, JSON.parse(one.arguments)]) };
  },
  structured: async () => {
    const schema = object({ ...city, degrees: { type: "integer" } });
    const answer = await create({
      response_format: {
        type: "json_schema",
        json_schema: { name: "place", strict: true, schema },
      },
    });
    return { object: JSON.parse(answer.choices[0].message.content) };
  },
};

console.log(JSON.stringify(await calls[call]()));
