import { cpSync } from "node:fs";

for (const name of ["ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"])
  cpSync(`node_modules/onnxruntime-web/dist/${name}`, `public/ort/${name}`);

const headers = [
  { key: "Cross-Origin-Opener-Policy", value: "same-origin" },
  { key: "Cross-Origin-Embedder-Policy", value: "require-corp" },
];

export default {
  headers: () => [{ source: "/:path*", headers }],
};
