// The functions of a model, by the names of its signatures.  Written by pax_export.
//
//   import {model} from "./model.js";
//   const {output} = await model.predict({images});
//
// An input is {data, shape}, nested arrays of numbers, or a typed array whose length says the one
// size that is open.  An output is {data, shape}.

import {load, open} from "./runtime.js";

export {load};
export const signatures = {};

/** The kinds of typed arrays by dtype. */
export const arrays = {
  float32: Float32Array, float64: Float64Array, float16: globalThis.Float16Array,
  int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
  bool: Uint8Array,
};

const sessions = {};

async function call(key, {file, data, inputs, outputs}, given = {}) {
  const unknown = Object.keys(given).find((name) => !Object.hasOwn(inputs, name));
  if (unknown !== undefined) {
    throw new TypeError(`${key}: expected the inputs ${Object.keys(inputs)}, got ${unknown}`);
  }
  const feeds = {};
  for (const [name, info] of Object.entries(inputs)) {
    feeds[name] = array(`${key}: ${name}`, info, Object.hasOwn(given, name) ? given[name] : undefined);
  }
  sessions[key] ??= open(file, data).catch((error) => { delete sessions[key]; throw error; });
  const {ort, types, run} = await sessions[key];
  const tensors = Object.keys(types).map((name) =>
    [name, new ort.Tensor(inputs[name].dtype, feeds[name].data, feeds[name].shape)]);
  const made = await run(Object.fromEntries(tensors));
  return Object.fromEntries(
    Object.keys(outputs).map((name) => [name, {data: made[name].data, shape: [...made[name].dims]}]));
}

function array(where, {dtype, shape}, given) {
  const fail = (got) => {
    throw new TypeError(`${where}: expected ${dtype}[${shape.join(", ")}], got ${got}`);
  };
  const Kind = arrays[dtype];
  if (Kind === undefined) fail("a browser without such arrays");
  let data = given?.data ?? given, sizes = given?.shape;
  if (!ArrayBuffer.isView(data)) {
    [data, sizes] = flatten(data, sizes, fail);
    const big = Kind === BigInt64Array || Kind === BigUint64Array;
    data = Kind.from(data, (each) => (big ? BigInt(each) : Number(each)));
  } else if (!(data instanceof Kind)) {
    fail(data.constructor.name);
  }
  sizes ??= wholeShape(shape, data.length);
  const fits = sizes?.length === shape.length
    && sizes.every((size, axis) => typeof shape[axis] === "string" || size === shape[axis])
    && sizes.reduce((product, size) => product * size, 1) === data.length;
  if (!fits) fail(sizes ? `[${sizes.join(", ")}] of ${data.length} numbers` : `${data.length} numbers`);
  return {data, shape: [...sizes]};
}

/** The shape with its one open size, as a number of elements says it. */
function wholeShape(shape, length) {
  const open = shape.filter((size) => typeof size === "string").length;
  const rest = shape.reduce((product, size) => (typeof size === "string" ? product : product * size), 1);
  if (open > 1 || (open && (!rest || length % rest))) return undefined;
  return shape.map((size) => (typeof size === "string" ? length / rest : size));
}

function flatten(given, sizes, fail) {
  const shape = [], flat = [];
  for (let each = given; Array.isArray(each); each = each[0]) shape.push(each.length);
  const walk = (each, axis) => {
    if (axis === shape.length) {
      if (!["number", "bigint", "boolean"].includes(typeof each)) fail(each === undefined ? "nothing" : typeof each);
      flat.push(each);
    } else if (!Array.isArray(each) || each.length !== shape[axis]) {
      fail("rows of several lengths");
    } else {
      each.forEach((inner) => walk(inner, axis + 1));
    }
  };
  walk(given, 0);
  return [flat, sizes ?? shape];
}

export const model = Object.fromEntries(Object.entries(signatures).map(
  ([key, info]) => [key, (inputs) => call(key, info, inputs)]));
export default model;
