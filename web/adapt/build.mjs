/** Builds the static page into web/adapt/dist. */

import { fileURLToPath } from "node:url";
import { buildPage } from "../scripts/page.mjs";

const here = fileURLToPath(new URL(".", import.meta.url));

await buildPage(here, ["index.html", "style.css"], { webgpu: true });
