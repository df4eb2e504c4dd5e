import { join } from "node:path";

export default {
  mode: "production",
  entry: "./src/main.js",
  output: { path: join(import.meta.dirname, "public", "build"), publicPath: "/build/" },
  resolve: { conditionNames: ["onnxruntime-web-use-extern-wasm", "..."] },
  devServer: {
    static: "public",
    headers: {
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Embedder-Policy": "require-corp",
    },
  },
};
