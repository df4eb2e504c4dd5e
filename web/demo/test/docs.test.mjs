/** The page of 20 lines in docs/devices/browser.md runs as it stands there. */

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { it } from "node:test";
import { folderOf, prepare } from "../../test/support.mjs";
import { serve, startBrowser } from "./support.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");

it("trains an MLP of 64 features", { timeout: 300_000 }, async (t) => {
  prepare();
  const [, page] = /```html\n(.*?)```/s.exec(readFileSync(join(root, "docs", "devices", "browser.md"), "utf8"));
  const site = mkdtempSync(join(tmpdir(), "onnxtrain-site-"));
  t.after(() => rmSync(site, { recursive: true }));
  writeFileSync(join(site, "index.html"), page);
  // Copies: the server follows no links out of its folder.
  cpSync(folderOf("mlp"), join(site, "artifacts"), { recursive: true });
  cpSync(join(root, "web", "dist"), join(site, "node_modules", "onnxtrain-web", "dist"), { recursive: true });
  for (const file of ["ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"]) {
    const path = join("node_modules", "onnxruntime-web", "dist", file);
    cpSync(join(root, "web", path), join(site, path));
  }
  const server = await serve(0, site);
  t.after(server.close);
  const { context, close } = await startBrowser();
  t.after(close);
  const tab = await context.newPage();
  await tab.goto(server.url);
  await tab.waitForFunction(() => document.body.textContent.trim().split(/\s+/).length === 20);
  const losses = (await tab.locator("body").textContent()).trim().split(/\s+/).map(Number);
  assert.ok(
    losses.every((loss) => loss > 0 && loss < 5),
    losses.join(" "),
  );
  assert.ok(losses.at(-1) < losses[0] - 0.5, losses.join(" "));
});
