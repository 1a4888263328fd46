// A form for each function of the model: a drawing field for images, fields for other numbers.

import {load, model, signatures} from "./model.js";

const MOST_FIELDS = 32, MOST_BARS = 100, MOST_SHOWN = 1000, SIDE = 280;

function make(tag, about = {}, ...inside) {
  const element = Object.assign(document.createElement(tag), about);
  element.append(...inside);
  return element;
}

/** Height, width and channels of an image, and the axis of the channels; undefined for others. */
function imageSizes({dtype, shape}) {
  if (!/^(float|uint8)/.test(dtype) || shape.length < 3 || shape.length > 4) return undefined;
  const [a, b, c = 1] = shape.slice(1);
  const isSide = (size) => Number.isInteger(size) && size >= 8 && size <= 2048;
  if (isSide(a) && isSide(b) && [1, 3].includes(c)) return {height: a, width: b, channels: c};
  if ([1, 3].includes(a) && isSide(b) && isSide(c)) {
    return {height: b, width: c, channels: a, first: true};
  }
  return undefined;
}

/** A field to draw in; gives its element, and what reads the numbers. */
function drawing({height, width, channels, first}, shape, changed) {
  const canvas = make("canvas", {width: SIDE, height: Math.round((SIDE * height) / width)});
  const pen = canvas.getContext("2d", {willReadFrequently: true});
  const clear = () => { pen.fillStyle = "#000"; pen.fillRect(0, 0, canvas.width, canvas.height); };
  const range = make("select", {onchange: changed}, ...[[0, 1], [0, 255], [-1, 1]].map(
    ([low, high]) => make("option", {value: `${low},${high}`}, `black ${low}, white ${high}`)));
  canvas.onpointerdown = (event) => { canvas.setPointerCapture(event.pointerId); draw(event, false); };
  canvas.onpointermove = (event) => { if (event.buttons) draw(event, true); };
  canvas.onpointerup = changed;
  let last;
  const draw = ({offsetX, offsetY}, joined) => {
    const scale = canvas.width / canvas.clientWidth, at = [offsetX * scale, offsetY * scale];
    Object.assign(pen, {strokeStyle: "#fff", lineWidth: SIDE / 9, lineCap: "round"});
    pen.beginPath();
    pen.moveTo(...(joined ? last : at));
    pen.lineTo(...at);
    pen.stroke();
    last = at;
  };
  const picture = make("input", {type: "file", accept: "image/*", onchange: async () => {
    pen.drawImage(await createImageBitmap(picture.files[0]), 0, 0, canvas.width, canvas.height);
    changed();
  }});
  const wipe = make("button", {type: "button", onclick: () => { clear(); changed(); }}, "Clear");
  clear();
  const numbers = () => {
    const small = new OffscreenCanvas(width, height).getContext("2d");
    Object.assign(small, {imageSmoothingQuality: "high"});
    small.drawImage(canvas, 0, 0, width, height);
    const pixels = small.getImageData(0, 0, width, height).data;
    const [low, high] = range.value.split(",").map(Number), size = height * width;
    return Array.from({length: size * channels}, (_, at) => {
      const [pixel, channel] = first ? [at % size, Math.floor(at / size)]
        : [Math.floor(at / channels), at % channels];
      return low + ((high - low) * pixels[4 * pixel + channel]) / 255;
    });
  };
  const sizes = [1, ...shape.slice(1)];
  return [[canvas, wipe, " ", range, " ", picture], () => ({data: numbers(), shape: sizes})];
}

/** Number fields, or a text of numbers where they are many or their count is open. */
function numberFields({dtype, shape}) {
  const fixed = shape.map((size, axis) => (axis === 0 && typeof size === "string" ? 1 : size));
  const count = fixed.reduce((product, size) => product * size, 1);
  if (count <= MOST_FIELDS) {  // which is false for NaN
    const step = dtype.startsWith("float") ? "any" : 1;
    const each = Array.from({length: count}, () => make("input", {type: "number", value: 0, step}));
    return [each, () => ({data: each.map((field) => field.value || 0), shape: fixed})];
  }
  const text = make("textarea", {rows: 3, placeholder: "numbers, separated by spaces or commas"});
  return [[text], () => {
    const data = text.value.split(/[\s,]+/).filter(Boolean);
    const open = fixed.findLastIndex((size) => typeof size === "string");
    const sizes = fixed.map((size, axis) => (typeof size === "string" && axis !== open ? 1 : size));
    const rest = sizes.reduce((product, size, axis) => (axis === open ? product : product * size), 1);
    return {data, shape: sizes.map((size, axis) => (axis === open ? data.length / rest : size))};
  }];
}

function shown(name, {data, shape}) {
  const values = Array.from(data.slice(0, MOST_SHOWN), Number);
  const title = make("h3", {}, name, " ", make("small", {}, `[${shape.join(", ")}]`));
  if (data.length > MOST_BARS || data.length < 2) {
    return [title, make("pre", {}, values.join(", ") + (data.length > MOST_SHOWN ? ", …" : ""))];
  }
  const low = Math.min(0, ...values), high = Math.max(...values, low + 1e-9);
  const bars = values.flatMap((value, at) => {
    const className = value === high ? "largest" : "";
    return [make("span", {className}, `${at}`), make("meter", {min: low, max: high, value}),
      make("span", {className}, value.toPrecision(4))];
  });
  return [title, make("div", {className: "bars"}, ...bars)];
}

function section(name, {inputs}) {
  const results = make("div"), readers = {};
  const run = async () => {
    try {
      const given = Object.fromEntries(Object.entries(readers).map(([key, read]) => [key, read()]));
      const begin = performance.now(), outputs = await model[name](given);
      const time = `${(performance.now() - begin).toFixed(1)} ms`;
      const parts = Object.entries(outputs).flatMap(([key, value]) => shown(key, value));
      results.replaceChildren(...parts, make("small", {}, time));
    } catch (error) {
      results.replaceChildren(make("pre", {className: "error"}, `${error}`));
    }
  };
  const fields = Object.entries(inputs).map(([key, info]) => {
    const image = imageSizes(info);
    const [elements, read] = image ? drawing(image, info.shape, run) : numberFields(info);
    readers[key] = read;
    const kind = make("small", {}, `${info.dtype}[${info.shape.join(", ")}]`);
    return make("fieldset", {}, make("legend", {}, key, " ", kind), ...elements);
  });
  const button = make("button", {type: "button", onclick: run}, "Run");
  return make("section", {}, make("h2", {}, name), ...fields, button, results);
}

const status = document.querySelector("#status");
const asked = new URLSearchParams(location.search).get("provider") ?? undefined;
try {
  status.textContent = "Loading onnxruntime-web …";
  const {provider} = await load(asked);
  status.textContent = `Runs in this browser, with ${{webgpu: "WebGPU", wasm: "WebAssembly"}[provider]}.`;
  const sections = Object.entries(signatures).map(([name, info]) => section(name, info));
  document.querySelector("main").append(...sections);
} catch (error) {
  status.className = "error";
  status.textContent = `onnxruntime-web cannot be started: ${error}`;
}
