export interface Message {
  role: string;
  content: string;
}

export interface Options {
  /** How many tokens are added at most; as many as the context has room for by default. */
  maxNewTokens?: number;
  /** 0, the default, takes the likeliest token; else one is drawn. */
  temperature?: number;
  /** Ends the text when it is aborted. */
  signal?: AbortSignal;
}

/** The answer to a conversation, in pieces. */
export declare function chat(messages: Message[], options?: Options): AsyncGenerator<string>;

/** The ids that follow some ids, one by one, up to and with one that ends a text. */
export declare function generate(ids: number[], options?: Options): AsyncGenerator<number>;

/** A conversation as the model was trained to read it. */
export declare function render(messages: Message[]): string;

/** The ids of a text. */
export declare function encode(
  text: string, options?: {add_special_tokens?: boolean}): Promise<number[]>;

/** The text of ids, without special tokens. */
export declare function decode(ids: number[]): Promise<string>;

/** Loads the model and its tokenizer; other functions do it where it was not done. */
export declare function ready(): Promise<{provider: "webgpu" | "wasm"}>;

/** Starts onnxruntime-web, by itself or with this provider. */
export declare function load(provider?: "webgpu" | "wasm"): Promise<{provider: "webgpu" | "wasm"}>;
