import { join } from "node:path";

export default {
  mode: "production",
  entry: "./src/main.js",
  output: { path: join(import.meta.dirname, "public", "build"), publicPath: "/build/" },
  devServer: {
    static: "public",
    headers: {
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Embedder-Policy": "require-corp",
    },
  },
};
