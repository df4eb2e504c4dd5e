import * as ort from "onnxruntime-web/wasm";

ort.env.wasm.wasmPaths = "/build/ort/";
export { ort };
