/** The small modules: JSON, SHA-256, safetensors, random numbers, the queue. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { it } from "node:test";
import { BY_NAME } from "../dist/dtypes.js";
import { parseJson, scalarText } from "../dist/json.js";
import { numberAt } from "../dist/ort.js";
import { Queue } from "../dist/queue.js";
import { Random } from "../dist/random.js";
import { decodeSafetensors, encodeSafetensors } from "../dist/safetensors.js";
import { Sha256 } from "../dist/sha256.js";
import { runPython } from "./support.mjs";

it("JSON: what JSON.parse reads, and NaN and Infinity", () => {
  for (const text of ['{"a":[1,-2.5e3,"x\\n\\u00e9",true,false,null,{}],"b":[]}', "[]", '"😀"', " 3 "]) {
    assert.deepEqual(JSON.parse(JSON.stringify(parseJson(text))), JSON.parse(text));
  }
  assert.deepEqual(parseJson("[NaN, Infinity, -Infinity]"), [NaN, Infinity, -Infinity]);
  assert.equal(parseJson('{"__proto__": 1}')["__proto__"], 1);
});

it("JSON: numbers that JavaScript's own JSON loses", () => {
  const values = [
    2 ** 53 - 1,
    2n ** 53n + 1n,
    -(2n ** 64n) - 1n,
    1e16,
    -0,
    0,
    NaN,
    Infinity,
    -Infinity,
    1e300,
    5e-324,
    0.1,
    3,
  ];
  const text = `[${values.map(scalarText).join(", ")}]`;
  assert.deepEqual(parseJson(text), values);
  // What Python reads, by the types of its numbers.
  assert.equal(
    text,
    "[9007199254740991, 9007199254740993, -18446744073709551617, 10000000000000000.0, -0.0, 0, NaN, Infinity, -Infinity, 1e+300, 5e-324, 0.1, 3]",
  );
  assert.equal(scalarText('"é"\n'), JSON.stringify('"é"\n'));
  assert.equal(parseJson("9007199254740993"), 9007199254740993n);
  assert.throws(() => parseJson("9".repeat(5000)), /5000 digits/);
});

it("JSON: what is none", () => {
  for (const text of [
    "",
    "{",
    '{"a" 1}',
    "[1,]",
    "{,}",
    '{"a":1,"a":2}',
    "01",
    "1 2",
    "[1}",
    "tru",
    "'a'",
    '"a',
    "[".repeat(9999),
  ]) {
    assert.throws(() => parseJson(text), Error, text.slice(0, 20));
  }
});

it("SHA-256 is that of Node, whatever the pieces", () => {
  const bytes = Uint8Array.from({ length: 1000 }, (_, i) => (i * 7) % 256);
  for (const length of [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000]) {
    const part = bytes.subarray(0, length);
    const digest = new Sha256().update(part.subarray(0, length >> 1)).update(part.subarray(length >> 1));
    assert.equal(digest.hex(), createHash("sha256").update(part).digest("hex"), String(length));
  }
});

it("safetensors: encode and decode are inverse", () => {
  const tensors = new Map(
    [...BY_NAME.values()].map((dtype, i) => [
      `k/${dtype.name}`,
      { dtype, shape: [i % 3, 2], bytes: new Uint8Array((i % 3) * 2 * dtype.size).fill(i % 2) },
    ]),
  );
  const file = encodeSafetensors(tensors, { a: "é" });
  const decoded = decodeSafetensors(file);
  assert.deepEqual(decoded.metadata, { a: "é" });
  assert.deepEqual(new Map([...decoded.tensors].sort()), new Map([...tensors].sort()));
  // In a larger array, at an odd offset.
  const moved = new Uint8Array(file.length + 3);
  moved.set(file, 3);
  assert.deepEqual(decodeSafetensors(moved.subarray(3)).tensors, decoded.tensors);
});

it("random numbers are those of the five lines of Python in the README", () => {
  const random = new Random(7);
  const python = JSON.parse(runPython("random_numbers.py", "7", "1000"));
  assert.deepEqual(
    Array.from({ length: 1000 }, () => random.integer()),
    python,
  );
});

it("masks, orders and uniform numbers are what they claim", () => {
  const random = new Random(1);
  const mask = random.dropoutMask(10_000, 0.1);
  const zeros = mask.filter((value) => value === 0).length;
  assert.ok(zeros > 900 && zeros < 1100, String(zeros));
  assert.ok(mask.every((value) => value === 0 || value === Math.fround(1 / 0.9)));
  assert.deepEqual(
    [...random.permutation(50)].sort((a, b) => a - b),
    Array.from({ length: 50 }, (_, i) => i),
  );
  assert.notDeepEqual(random.permutation(50), random.permutation(50));
  assert.deepEqual(new Random(5).permutation(9), new Random(5).permutation(9));
  assert.notDeepEqual(new Random(5).permutation(9), new Random(6).permutation(9));
});

it("halves as raw bits: finite ones, infinities and NaN are told apart", () => {
  const kinds = [0x3c00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0x7e00, 0xfe00];
  const numbers = kinds.map((_, i) => numberAt(new Uint16Array(kinds), i));
  assert.deepEqual(numbers.map(Number.isFinite), [true, true, true, false, false, false, false, false]);
  assert.deepEqual(numbers.map(Number.isNaN), [false, false, false, false, false, true, true, true]);
  assert.equal(numberAt(new Float32Array([1, -Infinity]), 1), -Infinity);
});

it("the queue runs jobs one after another, also behind failed ones", async () => {
  const queue = new Queue();
  const log = [];
  const job = (name, wait) => async () => {
    log.push(`${name} begins`);
    await new Promise((resolve) => setTimeout(resolve, wait));
    log.push(`${name} ends`);
    if (name === "b") throw new Error("b failed");
    return name;
  };
  assert.ok(queue.idle);
  const jobs = [queue.add(job("a", 20)), queue.add(job("b", 1)), queue.add(job("c", 5))];
  assert.ok(!queue.idle);
  const results = await Promise.allSettled(jobs);
  assert.deepEqual(
    results.map((r) => r.value ?? r.reason.message),
    ["a", "b failed", "c"],
  );
  assert.deepEqual(log, ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]);
  assert.ok(queue.idle);
});
