/** The page as an installed app: what browsers ask of one, and new versions of it. */

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, it } from "node:test";
import { Hand, labels, ready, serve, startBrowser } from "./support.mjs";

const dist = join(dirname(fileURLToPath(import.meta.url)), "..", "dist");
const folder = mkdtempSync(join(tmpdir(), "onnxtrain-app-"));

let server;
before(async () => {
  cpSync(dist, folder, { recursive: true });
  server = await serve(0, folder);
});
after(async () => {
  await server.close();
  rmSync(folder, { recursive: true, force: true });
});

async function start(t) {
  const { context, close } = await startBrowser();
  t.after(close);
  const page = context.pages()[0];
  await page.goto(server.url);
  await ready(page);
  await page.evaluate(() => navigator.serviceWorker.ready);
  return { context, page };
}

it("can be installed", async (t) => {
  const { context, page } = await start(t);
  const cdp = await context.newCDPSession(page);
  const { errors, data } = await cdp.send("Page.getAppManifest");
  assert.deepEqual(errors, []);
  const { installabilityErrors } = await cdp.send("Page.getInstallabilityErrors");
  assert.deepEqual(installabilityErrors, []);
  const { icons } = JSON.parse(data);
  for (const { src, sizes } of icons.filter(({ type }) => type === "image/png")) {
    // Width and height are in the bytes 16 to 23 of a PNG.
    const bytes = readFileSync(join(folder, src));
    assert.equal(`${bytes.readUInt32BE(16)}x${bytes.readUInt32BE(20)}`, sizes);
  }
});

it("keeps one version until the user asks for the next, and the drawings over it", async (t) => {
  const { context, page } = await start(t);
  await new Hand().add(page, 6);
  const heading = () => page.locator("#draw-title").textContent();
  const old = await heading();
  const change = (name, from, to) => {
    const text = readFileSync(join(folder, name), "utf8");
    assert.match(text, from);
    writeFileSync(join(folder, name), text.replace(from, to));
  };
  change("index.html", /(?<=id="draw-title">)[^<]*/, "The next version");
  change("sw.js", /(onnxtrain-handwriting-\$\{")?[0-9a-f]{12}/, (found) => `${found.slice(0, -12)}0123456789ab`);
  await page.reload();
  await ready(page);
  const update = page.getByRole("button", { name: "Update the page", exact: true });
  await update.waitFor();
  // All files are of the old version, also offline and in another tab.
  await context.setOffline(true);
  await page.reload();
  await ready(page);
  assert.deepEqual([await heading(), await labels(page)], [old, [6]]);
  await update.click();
  await page.getByRole("heading", { name: "The next version" }).waitFor();
  await ready(page);
  assert.deepEqual(await labels(page), [6]);
  assert.equal(await update.count(), 0);
  const caches = await page.evaluate(() => globalThis.caches.keys());
  assert.deepEqual(caches, ["onnxtrain-handwriting-0123456789ab"]);
});
