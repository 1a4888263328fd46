// Starts onnxruntime-web: with WebGPU where there is an adapter, with WebAssembly elsewhere.

let started;

/** Starts the runtime, by itself or with the provider that is named; later calls change nothing. */
export function load(provider) {
  started ??= start(provider).catch((error) => { started = undefined; throw error; });
  return started;
}

async function start(wanted) {
  const provider = wanted ?? ((await hasAdapter()) ? "webgpu" : "wasm");
  const names = {webgpu: "ort-wasm-simd-threaded.asyncify", wasm: "ort-wasm-simd-threaded"};
  if (!(provider in names)) throw new TypeError(`load: expected "webgpu" or "wasm", got ${provider}`);
  const ort = await import(place(`onnxruntime-web/ort.${provider}.min.js`));
  const name = place(`onnxruntime-web/${names[provider]}`);
  ort.env.logLevel = "error";
  if (!globalThis.crossOriginIsolated) ort.env.wasm.numThreads = 1;  // threads share memory
  ort.env.wasm.wasmPaths = {mjs: `${name}.js`, wasm: `${name}.wasm`};
  return {ort, provider};
}

const hasAdapter = async () => !!(await globalThis.navigator?.gpu?.requestAdapter().catch(() => null));
const place = (name) => new URL(name, import.meta.url).href;

/** The bytes of a file of this folder. */
export async function read(name) {
  const url = place(name);
  if (url.startsWith("file:")) {  // in Node.js
    const {readFile} = await import("node:fs/promises");
    return new Uint8Array(await readFile(new URL(url)));
  }
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

/**
 * A session of a model of this folder, whose arrays may be in files beside it.
 *
 * What WebGPU refuses, such as float16 on a device without it, is computed with WebAssembly.
 */
export async function open(file, beside = [], options = {}) {
  const {ort, provider} = await load();
  const externalData = await Promise.all(
    beside.map(async (path) => ({path: path.split("/").pop(), data: await read(path)})));
  const content = await read(file);
  const start = (executionProviders, more) =>
    ort.InferenceSession.create(content, {executionProviders, externalData, ...more});
  const onProcessor = () => start(["wasm"]);
  let session = provider === "wasm" ? await onProcessor()
    : await start(["webgpu", "wasm"], options).catch(onProcessor);
  let fallback = provider === "wasm" ? undefined : async (feeds) => {
    const other = await onProcessor(), made = await other.run(feeds);
    [session, fallback] = [other, undefined];
    return made;
  };
  let last = Promise.resolve();  // a session makes one call at a time
  const run = (feeds) => {
    const made = last.then(() => session.run(feeds)).catch((error) => {
      if (fallback === undefined) throw error;
      return fallback(feeds);
    });
    last = made.catch(() => undefined);
    return made;
  };
  const types = session.inputMetadata.map(({name, type}) => [name, type]);
  return {ort, types: Object.fromEntries(types), run};
}
