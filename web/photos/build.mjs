/** Builds the static page into web/photos/dist. */

import { fileURLToPath } from "node:url";
import { buildPage } from "../scripts/page.mjs";

const here = fileURLToPath(new URL(".", import.meta.url));
const statics = ["index.html", "style.css", "icon.svg", "icon.png", "app.webmanifest"];
await buildPage(here, statics, { offline: true });
