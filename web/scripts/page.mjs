/** Builds a static page into the folder `dist` beside its sources: scripts, ONNX Runtime's files, and a service worker. */

import { createHash } from "node:crypto";
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, statSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const web = join(dirname(fileURLToPath(import.meta.url)), "..");

/**
 * Builds `folder`/dist from `folder`/src: page.ts, worker.ts and the files `statics`; dist/model must be there. With
 * `offline` the page gets the service worker of web/demo, which keeps all files. With `webgpu` it also gets ONNX Runtime's
 * build for WebGPU; a browser loads one of the two builds.
 */
export async function buildPage(folder, statics, { offline = false, webgpu = false } = {}) {
  const name = basename(folder);
  const dist = join(folder, "dist");
  if (!existsSync(join(dist, "model", "manifest.json"))) {
    throw new Error(
      `web/${name}/dist/model is missing. Make it first: python web/${name}/model/make.py web/${name}/dist/model`,
    );
  }
  for (const old of readdirSync(dist)) if (old !== "model") rmSync(join(dist, old), { recursive: true });

  // ONNX Runtime stays in files of its own: it starts its threads from its script, and a bundle would start ours with it.
  const runtime = {
    name: "runtime",
    setup: ({ onResolve }) =>
      onResolve({ filter: /^onnxruntime-web\/(wasm|webgpu)$/ }, ({ path }) => ({
        path: `./ort/ort.${path.split("/")[1]}.min.mjs`,
        external: true,
      })),
  };
  const options = {
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    outdir: dist,
    plugins: [runtime],
    alias: { "onnxtrain-web": join(web, "src", "index.ts") },
    external: ["node:*"],
  };
  await build({ ...options, entryPoints: ["page", "worker"].map((script) => join(folder, "src", `${script}.ts`)) });

  const ort = dirname(createRequire(import.meta.url).resolve("onnxruntime-web/ort-wasm-simd-threaded.wasm"));
  mkdirSync(join(dist, "ort"));
  const builds = ["ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"];
  if (webgpu)
    builds.push("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm");
  for (const file of builds) cpSync(join(ort, file), join(dist, "ort", file));
  for (const file of statics) cpSync(join(folder, file), join(dist, file));

  const files = readdirSync(dist, { recursive: true })
    .map((file) => String(file).replaceAll("\\", "/"))
    .filter((file) => statSync(join(dist, file)).isFile())
    .sort();
  if (offline) {
    const digest = createHash("sha256");
    for (const file of files) digest.update(file).update(readFileSync(join(dist, file)));
    await build({
      ...options,
      entryPoints: [join(web, "demo", "src", "sw.ts")],
      define: {
        PAGE: JSON.stringify(name === "demo" ? "handwriting" : name),
        FILES: JSON.stringify(["./", ...files]),
        VERSION: JSON.stringify(digest.digest("hex").slice(0, 12)),
      },
    });
    files.push("sw.js");
  }
  const size = (file) => `${file} ${(statSync(join(dist, file)).size / 1024).toFixed(0)} KB`;
  console.log(`web/${name}/dist: ${files.map(size).join(", ")}`);
}
