/** Serves web/photos/dist: node web/photos/serve.mjs [port] [host] */

import { fileURLToPath } from "node:url";
import { serve } from "../demo/serve.mjs";

const { url } = await serve(
  Number(process.argv[2] ?? 8001),
  fileURLToPath(new URL("dist", import.meta.url)),
  process.argv[3],
);
console.log(`The page is at ${url} (Ctrl+C ends the server).`);
