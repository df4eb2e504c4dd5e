import { cpSync } from "node:fs";
import { build } from "esbuild";

await build({
  entryPoints: ["src/main.js", "src/worker.js"],
  outdir: "public/build",
  bundle: true,
  minify: true,
  format: "esm",
  conditions: ["onnxruntime-web-use-extern-wasm"],
});
for (const name of ["ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"])
  cpSync(`node_modules/onnxruntime-web/dist/${name}`, `public/build/ort/${name}`);
