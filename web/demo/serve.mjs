/**
 * Serves web/demo/dist: node web/demo/serve.mjs [port] [host]
 *
 * With the two headers without which browsers give no page threads, and compressed, as web servers do it.
 */

import { createReadStream, readFileSync, realpathSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, extname, join, sep } from "node:path";
import { pipeline } from "node:stream";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const dist = join(dirname(fileURLToPath(import.meta.url)), "dist");
const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".css": "text/css",
  ".json": "application/json",
  ".png": "image/png",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
  ".webmanifest": "application/manifest+json",
};
const compressed = new Map();

/** Starts the server; `folder` is served, to this machine only unless `host` is e.g. 0.0.0.0. Resolves to {url, close}. */
export function serve(port = 0, folder = dist, host = "127.0.0.1") {
  const server = createServer((request, response) => {
    const headers = {
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Embedder-Policy": "require-corp",
      "Cache-Control": "no-cache",
    };
    let path;
    try {
      // Links and ".." are followed first: what is served is in the folder.
      const root = realpathSync(folder);
      const at = (name) => {
        const real = realpathSync(name);
        if (real !== root && !real.startsWith(root + sep)) throw new Error("outside");
        return real;
      };
      path = at(join(root, decodeURIComponent(new URL(request.url, "http://localhost").pathname)));
      if (statSync(path).isDirectory()) path = at(join(path, "index.html"));
      const { size, mtimeMs } = statSync(path);
      // A folder that is named like a file, a pipe, a device.
      if (!statSync(path).isFile()) throw new Error("no file");
      headers["Content-Type"] = TYPES[extname(path)] ?? "application/octet-stream";
      if (size > 1024 && /\bgzip\b/.test(request.headers["accept-encoding"] ?? "")) {
        const key = `${path} ${mtimeMs}`;
        if (!compressed.has(key)) compressed.set(key, gzipSync(readFileSync(path)));
        response.writeHead(200, { ...headers, "Content-Encoding": "gzip" }).end(compressed.get(key));
        return;
      }
    } catch {
      response.writeHead(404, headers).end("There is no such file.");
      return;
    }
    response.writeHead(200, headers);
    // Ends both sides when the file cannot be read, or the browser leaves.
    pipeline(createReadStream(path), response, () => {});
  });
  return new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(port, host, () => {
      const close = () => new Promise((done) => (server.closeAllConnections(), server.close(done)));
      resolve({ url: `http://localhost:${server.address().port}/`, close });
    });
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const { url } = await serve(Number(process.argv[2] ?? 8000), dist, process.argv[3]);
  console.log(`The page is at ${url} (Ctrl+C ends the server).`);
}
