/**
 * Parses JSON texts as Python's `json` writes and onnxtrain reads them: NaN and Infinity are numbers, and an object with
 * the same key twice is an error.
 *
 * `JSON.parse` refuses NaN, and of two equal keys takes the last one: two hosts could then see different checkpoints in
 * one file. Integers that a number cannot hold exactly are bigints.
 */

export type Json = null | boolean | number | bigint | string | Json[] | { [key: string]: Json };

const TOKEN =
  /[ \t\n\r]*(?:([{}[\],:])|("(?:[^"\\\u0000-\u001f]|\\.)*")|(-?(?:(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|Infinity)|NaN)|(true|false|null))/y;
const LITERALS: Record<string, Json> = { true: true, false: false, null: null };
// Deeper texts are no file of ours, and would overflow the stack.
const MAX_DEPTH = 500;

// Python's limit; longer integers would take minutes to convert.
const MAX_DIGITS = 4300;

function toNumber(text: string): number | bigint {
  const number = Number(text);
  if (!/^-?\d+$/.test(text) || Number.isSafeInteger(number)) return number;
  if (text.length > MAX_DIGITS) throw new Error(`a number has ${text.length} digits`);
  return BigInt(text);
}

/** Writes a number or text so that `parseJson`, and `json` in Python, read the same value. */
export function scalarText(value: number | bigint | string): string {
  if (typeof value === "string") return JSON.stringify(value);
  const text = Object.is(value, -0) ? "-0" : String(value);
  // Otherwise these would be read as integers.
  const real = typeof value === "number" && Number.isInteger(value) && !text.includes("e");
  return real && (text === "-0" || !Number.isSafeInteger(value)) ? `${text}.0` : text;
}

/** Parses `text`; throws an Error that says what is wrong. */
export function parseJson(text: string): Json {
  const tokens = new RegExp(TOKEN);
  let peeked: RegExpExecArray | null | undefined;
  const peek = (): RegExpExecArray => {
    if (peeked === undefined) peeked = tokens.exec(text);
    if (peeked === null) throw new Error("a text is no JSON");
    return peeked;
  };
  const take = (): RegExpExecArray => {
    const token = peek();
    peeked = undefined;
    return token;
  };
  const expect = (mark: string): void => {
    if (take()[1] !== mark) throw new Error(`a text is no JSON: '${mark}' is missing`);
  };
  const value = (depth: number): Json => {
    if (depth > MAX_DEPTH) throw new Error("a JSON text is nested too deeply");
    const [, mark, string, number, literal] = take();
    if (string !== undefined) return JSON.parse(string) as string;
    if (number !== undefined) return toNumber(number);
    if (literal !== undefined) return LITERALS[literal] as Json;
    if (mark === "[") {
      const list: Json[] = [];
      if (peek()[1] === "]") {
        take();
        return list;
      }
      for (;;) {
        list.push(value(depth + 1));
        if (peek()[1] === "]") break;
        expect(",");
      }
      take();
      return list;
    }
    if (mark !== "{") throw new Error("a text is no JSON");
    // Without a prototype: a key "__proto__" of a hostile file is then a key like any other.
    const object = Object.create(null) as { [key: string]: Json };
    if (peek()[1] === "}") {
      take();
      return object;
    }
    for (;;) {
      const key = take()[2];
      if (key === undefined) throw new Error("a text is no JSON: a key is no string");
      const name = JSON.parse(key) as string;
      if (name in object) throw new Error("a JSON object has the same key twice");
      expect(":");
      object[name] = value(depth + 1);
      if (peek()[1] === "}") break;
      expect(",");
    }
    take();
    return object;
  };
  const result = value(0);
  if (/[^ \t\n\r]/.test(text.slice(tokens.lastIndex))) throw new Error("a JSON text is followed by something else");
  return result;
}

/** Returns `value` as an object, or throws an Error that calls it `what`. */
export function asObject(value: Json | undefined, what: string): { [key: string]: Json } {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error(`${what} is no JSON object`);
  return value;
}

/** Returns `value` as a list, or throws an Error that calls it `what`. */
export function asList(value: Json | undefined, what: string): Json[] {
  if (!Array.isArray(value)) throw new Error(`${what} is no list`);
  return value;
}

/** Returns `value` as a text, or throws an Error that calls it `what`. */
export function asText(value: Json | undefined, what: string): string {
  if (typeof value !== "string") throw new Error(`${what} is no text`);
  return value;
}

/** Returns `value` as a list of different names, or throws an Error that calls it `what`. */
export function asNames(value: Json | undefined, what: string): string[] {
  const names = asList(value, what);
  if (!names.every((n) => typeof n === "string") || new Set(names).size < names.length) {
    throw new Error(`${what} is no list of different names`);
  }
  return names as string[];
}

/** Returns `value` as the sizes of a tensor, e.g. [3, 4], or throws an Error that calls the tensor `what`. */
export function asSizes(value: Json | undefined, what: string): number[] {
  const sizes = asList(value, `the shape of ${what}`);
  if (!sizes.every((d) => Number.isSafeInteger(d) && (d as number) >= 0)) {
    throw new Error(`the shape of ${what} is no list of sizes`);
  }
  return sizes as number[];
}
