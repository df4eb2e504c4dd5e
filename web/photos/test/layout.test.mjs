/** What one sees and hears: everything on one screen, readable colours, names for all controls, the keyboard, no network. */

import assert from "node:assert/strict";
import { join } from "node:path";
import { it } from "node:test";
import { contrasts } from "../../demo/test/contrasts.mjs";
import { addClass, addFiles, button, fixture, open, openMenu, photosOf, ready, status } from "./support.mjs";

const SIZES = [
  [390, 844],
  [844, 390],
  [768, 1024],
  [1366, 768],
  [1920, 1080],
];
const SCHEMES = [
  { colorScheme: "light", forcedColors: "none" },
  { colorScheme: "dark", forcedColors: "none" },
  { colorScheme: "light", forcedColors: "active" },
  { colorScheme: "dark", forcedColors: "active" },
];
const LIMIT = { timeout: 600_000 };
// With ONNXTRAIN_WEB_SCREENS=folder the test writes a picture of each size and scheme, with ONNXTRAIN_WEB_IMAGES the README's.
const { ONNXTRAIN_WEB_SCREENS: screens, ONNXTRAIN_WEB_IMAGES: images } = process.env;

it("has everything on one screen, readable and with names", LIMIT, async (t) => {
  const { page, problems } = await open(t, { hasTouch: true });
  for (const name of ["cup", "pen", "key"]) {
    await addClass(page, name);
    await addFiles(page, name, ...photosOf(name, 4));
  }
  if (images) {
    await page.setViewportSize({ width: 1366, height: 768 });
    await page.getByRole("button", { name: /^Photo 2 of cup/ }).click();
    await page.screenshot({ path: join(images, "photos.jpg"), quality: 85 });
  }
  // A wrong file, so that there is a message of failure, too.
  await addFiles(page, "cup", fixture("text.jpg"));
  await page.getByRole("button", { name: /^Photo 2 of key/ }).click();
  const shown = [
    "frame",
    "guess",
    "camera",
    "status",
    "name",
    "add",
    "list",
    "accuracy",
    "count",
    "curve",
    "undo",
    "more",
  ];
  for (const [width, height] of SIZES) {
    await page.setViewportSize({ width, height });
    for (const scheme of SCHEMES) {
      await page.emulateMedia(scheme);
      await page.waitForTimeout(50);
      const { colorScheme, forcedColors } = scheme;
      const name = `photos-${width}x${height}-${colorScheme}${forcedColors === "active" ? "-forced" : ""}.png`;
      if (screens) await page.screenshot({ path: join(screens, name) });
      if (width !== 1366) continue;
      const found = await page.evaluate(contrasts);
      assert.ok(found.length > 20 && found[0][0] >= 4.5, `${name}: ${JSON.stringify(found.slice(0, 3))}`);
    }
    const size = await page.evaluate(() => {
      const { scrollWidth, scrollHeight } = document.documentElement;
      return [scrollWidth, scrollHeight];
    });
    assert.ok(size[0] <= width && size[1] <= height, `the page takes ${size} of ${width} x ${height}`);
    const boxes = new Map();
    for (const id of shown) boxes.set(id, await page.locator(`#${id}`).boundingBox());
    for (const [id, box] of boxes) {
      assert.ok(box.x >= 0 && box.y >= 0 && box.x + box.width <= width && box.y + box.height <= height + 0.5, id);
      assert.ok(box.width >= 20 && box.height >= 14, `${id}: ${JSON.stringify(box)}`);
      for (const [other, its] of boxes) {
        const apart =
          box.x + box.width <= its.x + 0.5 ||
          its.x + its.width <= box.x + 0.5 ||
          box.y + box.height <= its.y + 0.5 ||
          its.y + its.height <= box.y + 0.5;
        assert.ok(id === other || apart, `${width}: ${id} and ${other} overlap`);
      }
    }
    const frame = boxes.get("frame");
    assert.ok(Math.abs(frame.width - frame.height) < 1 && frame.width >= 160, JSON.stringify(frame));
    // A whole class is in sight.
    assert.ok(boxes.get("list").height >= (await page.locator(".class").first().boundingBox()).height, `${width}`);
    // Targets of fingers.
    const small = await page.evaluate(() =>
      [...document.querySelectorAll("button, .button, summary, select, input[type=number]")]
        .filter((control) => control.checkVisibility())
        .filter((control) => Math.min(control.offsetWidth, control.offsetHeight) < 24)
        .map((control) => control.outerHTML),
    );
    assert.deepEqual(small, []);
    await openMenu(page);
    const menu = await page.locator("#files").boundingBox();
    assert.ok(menu.y >= 0 && menu.y + menu.height <= height && menu.x + menu.width <= width, JSON.stringify(menu));
    await page.keyboard.press("Escape");
    const cut = await page.evaluate(() =>
      [...document.querySelectorAll("button, output, small, #status, h1, h2, .hint, .button")]
        .filter((item) => item.checkVisibility() && getComputedStyle(item).clipPath === "none")
        .filter((item) => getComputedStyle(item).display !== "inline" && item.scrollWidth > item.clientWidth + 1)
        .map((item) => item.outerHTML),
    );
    assert.deepEqual(cut, []);
  }
  for (const role of ["button", "textbox", "img", "list", "group", "combobox", "spinbutton", "region"]) {
    const names = await page
      .getByRole(role)
      .evaluateAll((nodes) =>
        nodes.map((node) => [
          node.alt ||
            node.ariaLabel ||
            node.labels?.[0]?.textContent ||
            document.getElementById(node.getAttribute("aria-labelledby"))?.textContent ||
            node.querySelector("img")?.alt ||
            node.textContent.trim(),
          node.outerHTML,
        ]),
      );
    for (const [name, html] of names) assert.ok(name, `${role} without a name: ${html}`);
  }
  assert.equal(await page.locator('[role="status"]').count(), 1);
  assert.deepEqual(problems, []);
});

it("works by the keyboard alone, and without a network", LIMIT, async (t) => {
  const { context, page } = await open(t);
  await page.evaluate(() => navigator.serviceWorker.ready);
  await page.reload();
  await ready(page);
  await context.setOffline(true);
  await page.reload();
  await ready(page);
  assert.match(await status(page), /^Ready/);
  await page.getByLabel("Name of a new class").focus();
  for (const name of ["cup", "pen"]) {
    await page.keyboard.type(name);
    await page.keyboard.press("Enter");
    await page.getByLabel(`Name of the class ${name}`).waitFor();
    await ready(page);
  }
  // From the name of a new class: the button, the list, and the first card's name, remover, camera and files.
  const focused = () => page.evaluate(() => document.activeElement.ariaLabel ?? document.activeElement.textContent);
  const order = [];
  for (let i = 0; i < 6; i++) {
    await page.keyboard.press("Tab");
    order.push(await focused());
  }
  assert.deepEqual(order, [
    "Add class",
    "Classes",
    "Name of the class cup",
    "Remove the class cup",
    "Take photo of cup",
    "Add files to cup",
  ]);
  const choosing = page.waitForEvent("filechooser");
  await page.keyboard.press("Enter");
  await (await choosing).setFiles(photosOf("cup", 2));
  await page.getByRole("img", { name: /^Photo 2 of cup/ }).waitFor();
  await addFiles(page, "pen", ...photosOf("pen", 2));
  await page.getByRole("button", { name: /^Photo 1 of cup, read as cup/ }).focus();
  await page.keyboard.press("Enter");
  assert.match(await page.locator("#guess").textContent(), /^cup \(\d+%\)$/);
  await page.keyboard.press("Tab");
  assert.equal(await focused(), "Remove photo 1");
  await page.keyboard.press("Enter");
  await page.getByRole("img", { name: /^Photo 2 of cup/ }).waitFor({ state: "detached" });
  assert.equal(await focused(), "Remove photo 1");
});
