// Clients of Node.js against an OpenAI-compatible server: node clients.mjs http://HOST:PORT/v1
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = process.argv[2];
const model = "tiny";
const messages = [{ role: "user", content: "How many pens are left?" }];
const parameters = {
  type: "object",
  properties: { some: { type: "boolean" } },
  required: ["some"],
  additionalProperties: false,
};

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const short = { model, messages, max_tokens: 12, temperature: 0 };
const text = (await client.chat.completions.create(short)).choices[0].message.content;
assert(text.length > 0);
let streamed = "";
let usage;
const asked = { ...short, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(asked)) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, 12);
assert.equal((await client.chat.completions.stream(short).finalChatCompletion()).choices[0].message.content, text);
const described = { type: "function", function: { name: "count", description: "Count.", parameters } };
const forced = { ...short, max_tokens: 100, tools: [described], tool_choice: "required", parallel_tool_calls: false };
const [call] = (await client.chat.completions.create(forced)).choices[0].message.tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).some, "boolean");
assert((await client.responses.create({ model, input: "Hi", max_output_tokens: 8 })).output_text.length > 0);
const kinds = [];
for await (const event of await client.responses.create({ model, input: "Hi", max_output_tokens: 8, stream: true }))
  kinds.push(event.type);
assert.deepEqual([kinds[0], kinds.at(-1)], ["response.created", "response.incomplete"]);
assert.equal((await client.embeddings.create({ model, input: ["a", "b"] })).data.length, 2);
await assert.rejects(client.chat.completions.create({ ...short, temperature: 9999 }), /temperature=9999/);

const vercel = createOpenAI({ baseURL, apiKey: "none" });
const compatible = { name: "here", baseURL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true };
for (const one of [createOpenAICompatible(compatible)(model), vercel.chat(model), vercel.responses(model)]) {
  const options = { model: one, prompt: "How many pens?", maxOutputTokens: 100, maxRetries: 0 };
  const whole = await generateText({ ...options, maxOutputTokens: 8 });
  assert.equal(whole.usage.outputTokens, 8);
  const stream = streamText({ ...options, maxOutputTokens: 8 });
  let pieces = "";
  for await (const piece of stream.textStream) pieces += piece;
  assert(pieces.length > 0);
  const schema = z.object({ pens: z.number().int().min(0).max(9) });
  assert.equal(typeof (await generateObject({ ...options, schema })).object.pens, "number");
  const tools = { count: tool({ description: "Count.", inputSchema: z.object({ some: z.boolean() }) }) };
  const calls = (await generateText({ ...options, tools, toolChoice: "required" })).toolCalls;
  assert.equal(calls[0].toolName, "count");
}
console.log("all is well");
