// A language model: answers conversations and continues ids of tokens.  Written by pax_export.
//
//   import {chat} from "./model.js";
//   for await (const piece of chat([{role: "user", content: "Hello"}])) console.log(piece);

import {load, open, read} from "./runtime.js";
import {Template} from "./jinja/index.js";
import {Tokenizer} from "./tokenizers/tokenizers.min.js";

export {load};
const {template, specialTokens} = {};

const PIECE = 128;  // tokens of a prompt that are read at a time: logits of each come out
let started;

/** The runtime, the files of the model and its tokenizer; the first call loads them. */
export function ready() {
  started ??= start().catch((error) => { started = undefined; throw error; });
  return started;
}

async function start() {
  const json = async (name) => JSON.parse(new TextDecoder().decode(await read(name)));
  const {provider} = await load();
  const [{model, search}, ...files] = await Promise.all(
    ["genai_config.json", "tokenizer.json", "tokenizer_config.json"].map(json));
  const layers = Array.from({length: model.decoder.num_hidden_layers}, (_, at) => at);
  const names = layers.flatMap((at) => [`${at}.key`, `${at}.value`]);
  const places = names.map((name) => [`present.${name}`, "gpu-buffer"]);
  const options = {preferredOutputLocation: Object.fromEntries(places)};
  const session = await open(model.decoder.filename, DATA, options);
  return {provider, model, search, names, session, tokenizer: new Tokenizer(...files)};
}

/** The ids of a text. */
export async function encode(text, {add_special_tokens = true} = {}) {
  return (await ready()).tokenizer.encode(text, {add_special_tokens}).ids;
}

/** The text of ids, without special tokens. */
export async function decode(ids) {
  return ids.length ? (await ready()).tokenizer.decode(ids, {skip_special_tokens: true}) : "";
}

/** A conversation as the model was trained to read it. */
export function render(messages) {
  if (!template) return messages.at(-1).content;
  const variables = {...specialTokens, messages, tools: null, add_generation_prompt: true};
  return new Template(template).render(variables);
}

/** The ids that follow some ids, one by one, up to and with one that ends a text. */
export async function* generate(ids, options = {}) {
  const {model, names, session, search} = await ready();
  const {maxNewTokens = Infinity, temperature, signal} = {temperature: 0, ...options};
  const {ort, run, types} = session, {decoder} = model;
  const stop = [model.eos_token_id ?? []].flat();
  const tensor = (values) =>
    new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
  const empty = [1, decoder.num_key_value_heads, 0, decoder.head_size];
  let past = names.map((name) => new ort.Tensor(types[`past_key_values.${name}`], [], empty));
  let rest = [...ids], length = 0, count = 0;
  try {
    while (count < maxNewTokens && length + rest.length < model.context_length && !signal?.aborted) {
      const fed = rest.splice(0, PIECE);
      length += fed.length;
      const made = await run({
        input_ids: tensor(fed),
        attention_mask: tensor(Array(length).fill(1)),
        ...Object.fromEntries(names.map((name, at) => [`past_key_values.${name}`, past[at]])),
      });
      past.forEach((each) => each.dispose());
      past = names.map((name) => made[`present.${name}`]);
      if (rest.length) continue;
      const next = choose(made.logits.data.subarray(-model.vocab_size), temperature, search.top_k);
      yield next;
      if (stop.includes(next)) return;
      [rest, count] = [[next], count + 1];
    }
  } finally {
    past.forEach((each) => each.dispose());
  }
}

/** The likeliest id, or with a temperature one of the likeliest, drawn. */
function choose(logits, temperature, most) {
  if (!temperature) return logits.reduce((best, each, at) => (each > logits[best] ? at : best), 0);
  const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]);
  const likely = order.slice(0, most > 1 ? most : 50);
  const weights = likely.map((at) => Math.exp((logits[at] - logits[likely[0]]) / temperature));
  let left = Math.random() * weights.reduce((sum, each) => sum + each, 0);
  return likely[Math.max(0, weights.findIndex((each) => (left -= each) < 0))];
}

/** The answer to a conversation, in pieces. */
export async function* chat(messages, options = {}) {
  const ids = await encode(render(messages), {add_special_tokens: !template});
  const made = [];
  let shown = "";
  for await (const id of generate(ids, options)) {
    made.push(id);
    const text = await decode(made);
    if (text.endsWith("\ufffd")) continue;  // a letter of which bytes are missing
    if (text !== shown) yield text.slice(shown.length);
    shown = text;
  }
}
