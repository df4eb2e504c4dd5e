import * as ort from "onnxruntime-web/wasm";

ort.env.wasm.wasmPaths = "/ort/";
export { ort };
