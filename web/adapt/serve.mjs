/** Serves web/adapt/dist: node web/adapt/serve.mjs [port] [host] */

import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { serve } from "../demo/serve.mjs";

const dist = join(dirname(fileURLToPath(import.meta.url)), "dist");
const { url } = await serve(Number(process.argv[2] ?? 8000), dist, process.argv[3]);
console.log(`The page is at ${url} (Ctrl+C ends the server).`);
