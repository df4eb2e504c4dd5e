/** Builds the static page into web/demo/dist: scripts, ONNX Runtime's files, and the service worker's list of them all. */

import { createHash } from "node:crypto";
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, statSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, "dist");
if (!existsSync(join(dist, "model", "manifest.json"))) {
  throw new Error("web/demo/dist/model is missing. Make it first: python web/demo/model/make.py web/demo/dist/model");
}
for (const name of readdirSync(dist)) if (name !== "model") rmSync(join(dist, name), { recursive: true });

// ONNX Runtime stays in files of its own: it starts its threads from its script, and a bundle would start ours with it.
const runtime = {
  name: "runtime",
  setup: ({ onResolve }) =>
    onResolve({ filter: /^onnxruntime-web\/wasm$/ }, () => ({ path: "./ort/ort.wasm.min.mjs", external: true })),
};
const options = {
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  outdir: dist,
  plugins: [runtime],
  alias: { "onnxtrain-web": join(here, "..", "src", "index.ts") },
};
await build({
  ...options,
  entryPoints: ["page", "worker"].map((name) => join(here, "src", `${name}.ts`)),
  external: ["node:*"],
});

const ort = dirname(createRequire(import.meta.url).resolve("onnxruntime-web/ort-wasm-simd-threaded.wasm"));
mkdirSync(join(dist, "ort"));
for (const name of ["ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"])
  cpSync(join(ort, name), join(dist, "ort", name));
for (const name of ["index.html", "style.css", "icon.svg", "icon.png", "app.webmanifest"])
  cpSync(join(here, name), join(dist, name));

const files = readdirSync(dist, { recursive: true })
  .map((name) => String(name).replaceAll("\\", "/"))
  .filter((name) => statSync(join(dist, name)).isFile())
  .sort();
const digest = createHash("sha256");
for (const name of files) digest.update(name).update(readFileSync(join(dist, name)));
await build({
  ...options,
  entryPoints: [join(here, "src", "sw.ts")],
  define: { FILES: JSON.stringify(["./", ...files]), VERSION: JSON.stringify(digest.digest("hex").slice(0, 12)) },
});
const size = (name) => `${name} ${(statSync(join(dist, name)).size / 1024).toFixed(0)} KB`;
console.log(`web/demo/dist: ${[...files, "sw.js"].map(size).join(", ")}`);
