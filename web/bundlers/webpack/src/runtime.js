export * as ort from "onnxruntime-web/wasm";
