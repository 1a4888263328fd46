import {encode, decode, generate, render} from "/model.js";

export async function answer({prompt, steps, text, messages}) {
  if (messages) return render(messages);
  if (text !== undefined) {
    const ids = await encode(text);
    return [ids, await decode(ids)];
  }
  const made = [];
  for await (const id of generate(prompt, {maxNewTokens: steps})) made.push(id);
  return made;
}
