import { train } from "./train.js";

// Threads need cross-origin isolation: two response headers of the server.
const threads = self.crossOriginIsolated ? 2 : 1;
postMessage(`${threads} thread(s):`);
train(threads, postMessage).catch(({ message }) => postMessage(message));
