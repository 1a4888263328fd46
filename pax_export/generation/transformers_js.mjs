// Runs prompts in transformers.js:
//
//   node transformers_js.mjs FOLDER CALLS.json RESULTS.json
//
// It resolves the package as a script in the current folder would, or from NODE_PATH.  CALLS.json
// and RESULTS.json are those of _runtime_calls.py; the prompts are continued twice, each alone, and
// all in one batch, padded on the left.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, given, made] = process.argv.slice(2);
const program = createRequire(join(process.cwd(), "program.js")).resolve(
  "@huggingface/transformers",
);
if (folder === undefined) process.exit(0); // it is there
const { AutoModelForCausalLM, AutoTokenizer, Tensor, env } = await import(
  pathToFileURL(program).href
);
env.allowRemoteModels = false;
const calls = JSON.parse(readFileSync(given, "utf8"));
const model = await AutoModelForCausalLM.from_pretrained(folder);

async function continued(prompts) {
  const length = Math.max(...prompts.map((each) => each.length));
  const filled = (each, value, rest) => [...Array(length - each.length).fill(value), ...rest];
  const ids = prompts.flatMap((each) => filled(each, 0, each));
  const mask = prompts.flatMap((each) => filled(each, 0, each.map(() => 1)));
  const tensor = (values) =>
    new Tensor("int64", BigInt64Array.from(values, BigInt), [prompts.length, length]);
  const whole = await model.generate({
    input_ids: tensor(ids),
    attention_mask: tensor(mask),
    do_sample: false,
    max_new_tokens: calls.steps,
    repetition_penalty: 1.0,
  });
  return whole.tolist().map((row) => {
    const ids = row.slice(length).map(Number), end = ids.findIndex((id) => calls.stop.includes(id));
    return end < 0 ? ids : ids.slice(0, end + 1); // without the padding of a batch
  });
}

const tokenizer = await AutoTokenizer.from_pretrained(folder);
const results = { prompts: [], texts: [] };
for (const each of calls.prompts) results.prompts.push(...(await continued([each])));
for (const each of calls.texts)
  results.texts.push(tokenizer.encode(each, { add_special_tokens: false }).map(Number));
results.prompts.push(...(await continued(calls.prompts)));
if (calls.messages) {
  results.conversation = tokenizer.apply_chat_template(calls.messages, {
    add_generation_prompt: true,
    tokenize: false,
  });
}
writeFileSync(made, JSON.stringify(results));
