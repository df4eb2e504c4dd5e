import * as ort from "onnxruntime-web/wasm";

ort.env.wasm.wasmPaths = {
  mjs: new URL("onnxruntime-web/ort-wasm-simd-threaded.mjs", import.meta.url),
  wasm: new URL("onnxruntime-web/ort-wasm-simd-threaded.wasm", import.meta.url),
};
export { ort };
