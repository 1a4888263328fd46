// A conversation with the model.

import {chat, load, ready} from "./model.js";

const make = (tag, about, ...inside) => {
  const element = Object.assign(document.createElement(tag), about);
  element.append(...inside);
  return element;
};

const status = document.querySelector("#status"), messages = [];
const shown = make("div", {className: "chat"});
const text = make("textarea", {rows: 2, placeholder: "Message", autofocus: true});
const send = make("button", {type: "submit"}, "Send");
const heat = make("input", {type: "number", min: 0, max: 2, step: 0.1, value: 0});
const form = make("form", {}, text, send);
let stop;

form.onsubmit = async (event) => {
  event.preventDefault();
  if (stop) return stop.abort();
  if (!text.value.trim()) return;
  messages.push({role: "user", content: text.value});
  const answer = make("p", {});
  shown.append(make("p", {className: "user"}, text.value), answer);
  [text.value, send.textContent, stop] = ["", "Stop", new AbortController()];
  let pieces = 0;
  const begin = performance.now();
  try {
    for await (const piece of chat(messages, {temperature: +heat.value, signal: stop.signal})) {
      answer.append(piece);
      pieces += 1;
      status.textContent = `${((1000 * pieces) / (performance.now() - begin)).toFixed(1)} tokens/s`;
      await new Promise(requestAnimationFrame);
    }
    messages.push({role: "assistant", content: answer.textContent});
  } catch (error) {
    messages.pop();
    answer.className = "error";
    answer.textContent = `${error}`;
  }
  [send.textContent, stop] = ["Send", undefined];
};
text.onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
};

try {
  status.textContent = "Loading the model …";
  await load(new URLSearchParams(location.search).get("provider") ?? undefined);
  const {provider} = await ready();
  status.textContent = `Runs in this browser, with ${{webgpu: "WebGPU", wasm: "WebAssembly"}[provider]}.`;
  document.querySelector("main").append(
    shown, form, make("label", {}, "Temperature ", heat), " 0: the likeliest words");
} catch (error) {
  status.className = "error";
  status.textContent = `The model cannot be loaded: ${error}`;
}
