/** Builds the static page into web/adapt/dist: scripts, and ONNX Runtime's files. */

import { cpSync, existsSync, mkdirSync, readdirSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, "dist");
if (!existsSync(join(dist, "model", "manifest.json"))) {
  throw new Error(
    "web/adapt/dist/model is missing. Make it first: python web/adapt/model/make.py web/adapt/dist/model",
  );
}
for (const name of readdirSync(dist)) if (name !== "model") rmSync(join(dist, name), { recursive: true });

// ONNX Runtime stays in files of its own, see web/demo/build.mjs.
const runtime = {
  name: "runtime",
  setup: ({ onResolve }) =>
    onResolve({ filter: /^onnxruntime-web\/(wasm|webgpu)$/ }, ({ path }) => ({
      path: `./ort/ort.${path.split("/")[1]}.min.mjs`,
      external: true,
    })),
};
await build({
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  outdir: dist,
  plugins: [runtime],
  alias: { "onnxtrain-web": join(here, "..", "src", "index.ts") },
  entryPoints: ["page", "worker"].map((name) => join(here, "src", `${name}.ts`)),
  external: ["node:*"],
});
const ort = dirname(createRequire(import.meta.url).resolve("onnxruntime-web/ort-wasm-simd-threaded.wasm"));
mkdirSync(join(dist, "ort"));
// A browser loads one of the two builds: that for WebGPU only where a graphics card was found.
for (const name of [
  "ort.wasm.min.mjs",
  "ort-wasm-simd-threaded.mjs",
  "ort-wasm-simd-threaded.wasm",
  "ort.webgpu.min.mjs",
  "ort-wasm-simd-threaded.asyncify.mjs",
  "ort-wasm-simd-threaded.asyncify.wasm",
])
  cpSync(join(ort, name), join(dist, "ort", name));
for (const name of ["index.html", "style.css"]) cpSync(join(here, name), join(dist, name));
