/** Where ONNX Runtime does not start, `create` says why, within seconds. Each of these cases waits without end, or blames the model, by itself. */

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, extname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import { build } from "esbuild";
import { folderOf, prepare } from "../../test/support.mjs";
import { serve, startBrowser } from "./support.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
const LIMIT = { timeout: 60_000 };
let server, browser, bundles, artifacts;

before(
  async () => {
    prepare();
    server = await serve(0, root);
    browser = await startBrowser();
    mkdirSync(join(root, "build"), { recursive: true });
    bundles = mkdtempSync(join(root, "build", "start-"));
    artifacts = `/${relative(root, folderOf("mlp"))}/`;
  },
  { timeout: 300_000 },
);
after(async () => {
  await browser?.close();
  await server?.close();
  if (bundles) rmSync(bundles, { recursive: true });
});

/** Opens an empty page and collects what its console says. */
async function open(t, url = server.url) {
  const page = await browser.context.newPage();
  t.after(() => page.close());
  const warnings = [];
  page.on("console", (message) => message.type() === "warning" && warnings.push(message.text()));
  await page.goto(`${url}web/demo/test/blank.html`);
  return { page, warnings };
}

/** Creates a session in a page; returns the error, or null, the losses of a step, and the time. */
function create(page, { runtime = "ort.wasm.min.mjs", wasm = {}, folder = artifacts, times = 1 } = {}) {
  return page.evaluate(
    async ({ runtime, wasm, folder, times }) => {
      const ort = await import(
        `/web/node_modules/onnxruntime-${runtime.includes("common") ? "common" : "web"}/dist/${runtime}`
      );
      const { TrainingSession } = await import("/web/dist/index.js");
      Object.assign(ort.env.wasm, { numThreads: 1 }, wasm);
      const results = [];
      for (let i = 0; i < times; i++) {
        const start = performance.now();
        const error = await TrainingSession.create(ort, { artifacts: folder, warmUp: false }).then(
          (session) => session.release(),
          (error) => `${error.name}: ${error.message}`,
        );
        results.push({ error: error ?? null, seconds: (performance.now() - start) / 1000 });
      }
      return results;
    },
    { runtime, wasm, folder, times },
  );
}

function refused({ error, seconds }, pattern) {
  assert.match(error, pattern);
  assert.ok(seconds < 10, `${seconds} seconds`);
}

describe("files of ONNX Runtime", LIMIT, () => {
  it("that are not there are named, with the server's answer, each time", LIMIT, async (t) => {
    const { page } = await open(t);
    const [first, second] = await create(page, { wasm: { wasmPaths: "/nowhere/" }, times: 2 });
    const pattern =
      /^ModelLoadError: TrainingSession\.create: ONNX Runtime did not start: .*Serve the \.wasm and \.mjs files .*It asked for http\S+\/nowhere\/ort-wasm-simd-threaded\.mjs \(status 404\)\.$/;
    refused(first, pattern);
    refused(second, pattern);
    assert.ok(!first.error.includes("previous call"), first.error);
  });
  it("of which the .wasm is not there", LIMIT, async (t) => {
    const { page } = await open(t);
    const mjs = "/web/node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.mjs";
    const [result] = await create(page, { wasm: { wasmPaths: { mjs, wasm: "/nowhere/ort.wasm" } } });
    refused(result, /did not start: .*Serve the \.wasm .*\/nowhere\/ort\.wasm \(status 404\)\.$/);
  });
  it("for which the server sends its page", LIMIT, async (t) => {
    const { page } = await open(t);
    const mjs = "/web/node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.mjs";
    const [result] = await create(page, { wasm: { wasmPaths: { mjs, wasm: "/web/demo/index.html" } } });
    refused(result, /did not start: .*found a page of HTML.*Serve the \.wasm /);
  });
});

it("artifacts for which the server sends its page", LIMIT, async (t) => {
  const pages = createServer((request, response) => {
    response.setHeader("Content-Type", extname(request.url) === ".html" ? "text/html" : "text/javascript");
    if (/^\/web\//.test(request.url)) response.end(readFileSync(join(root, new URL(request.url, "http://x").pathname)));
    else response.setHeader("Content-Type", "text/html").end("<!DOCTYPE html>\n<title>All routes</title>");
  });
  await new Promise((done) => pages.listen(0, "localhost", done));
  t.after(() => (pages.closeAllConnections(), pages.close()));
  const { page } = await open(t, `http://localhost:${pages.address().port}/`);
  const [result] = await create(page, { folder: "/artifacts/" });
  refused(result, /reading http\S+\/artifacts\/manifest\.json failed: the server answered with a page of HTML/);
});

describe("builds of ONNX Runtime without WebAssembly are refused", LIMIT, () => {
  for (const runtime of ["ort.webgl.min.mjs", "esm/index.js?common"]) {
    it(runtime, LIMIT, async (t) => {
      const { page } = await open(t);
      const [result] = await create(page, { runtime });
      refused(result, /does not compute in WebAssembly\. Import 'onnxruntime-web\/wasm'\.$/);
    });
  }
});

describe("threads", LIMIT, () => {
  /** Serves the repository, with the headers of isolation for the paths that `isolated` chooses. */
  async function proxy(t, isolated) {
    const plain = createServer(async (request, response) => {
      const answer = await fetch(new URL(request.url, server.url));
      for (const [name, value] of answer.headers)
        if (name === "content-type" || (name.startsWith("cross-origin") && isolated(request.url)))
          response.setHeader(name, value);
      response.writeHead(answer.status).end(Buffer.from(await answer.arrayBuffer()));
    });
    await new Promise((done) => plain.listen(0, "localhost", done));
    t.after(() => (plain.closeAllConnections(), plain.close()));
    return `http://localhost:${plain.address().port}/`;
  }

  it("without isolation give one warning, and one thread", LIMIT, async (t) => {
    const { page, warnings } = await open(t, await proxy(t, () => false));
    for (const { error } of await create(page, { wasm: { numThreads: 4 }, times: 2 })) assert.equal(error, null);
    assert.equal(warnings.length, 1, warnings.join("\n"));
    assert.match(warnings[0], /numThreads is 4, but .*Cross-Origin-Opener-Policy.*Cross-Origin-Embedder-Policy/);
  });

  it("of which the script has no headers, so that the browser blocks it", LIMIT, async (t) => {
    const { page } = await open(t, await proxy(t, (path) => path.endsWith(".html")));
    const [first, second] = await create(page, { wasm: { numThreads: 2 }, times: 2 });
    const pattern = /did not start: its thread http\S+\.mjs does not load\. .*Cross-Origin-Embedder-Policy/;
    refused(first, pattern);
    refused(second, pattern);
    assert.equal(await page.evaluate(() => Worker.name), "Worker");
  });

  /** Bundles ONNX Runtime with a script, as a bundler does that is told nothing, and serves it at `url`. */
  async function bundle(name, text) {
    const script = join(bundles, `${name}.js`);
    const ort = join(root, "web", "node_modules", "onnxruntime-web", "dist");
    writeFileSync(
      join(bundles, `${name}.in.js`),
      `import * as ort from ${JSON.stringify(join(ort, "ort.wasm.bundle.min.mjs"))};
       import { TrainingSession } from ${JSON.stringify(join(root, "web", "dist", "index.js"))};
       ort.env.wasm.numThreads = 2;
       ort.env.wasm.wasmPaths = { wasm: "/web/node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm" };
       const create = () => TrainingSession.create(ort, { artifacts: ${JSON.stringify(artifacts)}, warmUp: false });
       ${text}`,
    );
    await build({
      entryPoints: [join(bundles, `${name}.in.js`)],
      outfile: script,
      bundle: true,
      minify: true,
      format: "esm",
      external: ["node:*"],
    });
    return `/${relative(root, script)}`;
  }
  const PATTERN = /did not start: its thread http\S+\.js fails: Uncaught .*Set ort\.env\.wasm\.wasmPaths to the files/;

  it("that run the page's script", LIMIT, async (t) => {
    const url = await bundle("page", "document.title = 'page'; window.create = create;");
    const { page } = await open(t);
    const start = Date.now();
    const error = await page.evaluate(async (url) => {
      await import(url);
      return create().catch((error) => error.message);
    }, url);
    refused({ error, seconds: (Date.now() - start) / 1000 }, PATTERN);
  });

  it("that run a worker's script, which takes the messages", LIMIT, async (t) => {
    const url = await bundle(
      "worker",
      `postMessage("runs");
       self.onmessage = ({ data }) => data === "go" && create().catch(({ message }) => postMessage(message));`,
    );
    const { page } = await open(t);
    const start = Date.now();
    const error = await page.evaluate((url) => {
      const worker = new Worker(url, { type: "module" });
      worker.postMessage("go");
      return new Promise((resolve) => (worker.onmessage = ({ data }) => data !== "runs" && resolve(data)));
    }, url);
    refused({ error, seconds: (Date.now() - start) / 1000 }, PATTERN);
  });
});
