import { join } from "node:path";

export default {
  mode: "production",
  entry: "./src/main.js",
  output: { path: join(import.meta.dirname, "public", "build"), publicPath: "/build/" },
  // ONNX Runtime's .wasm file has 14 MB.
  performance: { hints: false },
  devServer: {
    static: "public",
    headers: {
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Embedder-Policy": "require-corp",
    },
  },
};
