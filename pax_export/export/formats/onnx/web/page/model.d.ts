/** An array in row-major order. */
export interface Tensor<Data> {
  data: Data;
  shape: number[];
}

export type Numbers = number | bigint | boolean | readonly Numbers[];

/** A tensor, nested arrays, or a typed array whose length says the one size that is open. */
export type Input<Data> = Tensor<Data> | Data | Numbers;

/** The functions of the model, by the names of its signatures. */
export interface Model {
  // FUNCTIONS
}

export declare const model: Model;
export default model;

export interface ArrayInfo {
  dtype: string;
  shape: (number | string)[];
}

/** The inputs and outputs of each function. */
export declare const signatures: Record<
  string,
  {file: string; data: string[]; inputs: Record<string, ArrayInfo>; outputs: Record<string, ArrayInfo>}
>;

/** Starts onnxruntime-web, by itself or with this provider; calls do it where it was not done. */
export declare function load(provider?: "webgpu" | "wasm"): Promise<{provider: "webgpu" | "wasm"}>;
