/** Bundles the package as a page would, and prints the size of it; fails above the limit of 30 KB gzip. */

import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const LIMIT = 30 * 1024;
const { outputFiles } = await build({
  entryPoints: [new URL("../src/index.ts", import.meta.url).pathname],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  write: false,
  external: ["node:*"],
});
const bytes = outputFiles[0].contents;
const zipped = gzipSync(bytes, { level: 9 }).length;
console.log(
  `onnxtrain-web: ${(bytes.length / 1024).toFixed(1)} KB minified, ${(zipped / 1024).toFixed(1)} KB gzip (limit ${LIMIT / 1024} KB)`,
);
if (zipped > LIMIT) process.exitCode = 1;
