/** The service worker: after the first load the page works without a network. */

// Filled in by the build: the page's name, all of its files, and a digest of their content.
declare const PAGE: string;
declare const FILES: string[];
declare const VERSION: string;

interface Lifetime extends Event {
  waitUntil(promise: Promise<unknown>): void;
}
interface Message extends Event {
  readonly data: unknown;
}
interface Request_ extends Lifetime {
  readonly request: Request;
  respondWith(response: Promise<Response>): void;
}

const worker = self as unknown as {
  addEventListener(name: "install" | "activate", listener: (event: Lifetime) => void): void;
  addEventListener(name: "message", listener: (event: Message) => void): void;
  addEventListener(name: "fetch", listener: (event: Request_) => void): void;
  skipWaiting(): Promise<void>;
  clients: { claim(): Promise<void> };
};
const NAME = `onnxtrain-${PAGE}-${VERSION}`;

worker.addEventListener("install", (event) => {
  event.waitUntil(
    (async () => {
      const cache = await caches.open(NAME);
      // Past the browser's own cache, which may hold files of an older version.
      await cache.addAll(FILES.map((file) => new Request(file, { cache: "reload" })));
    })(),
  );
});

// A new version waits until no tab has the old one, as files of both do not fit together, or the user asks for it.
worker.addEventListener("message", ({ data }) => {
  if (data === "activate") void worker.skipWaiting();
});

worker.addEventListener("activate", (event) => {
  event.waitUntil(
    (async () => {
      for (const name of await caches.keys())
        if (name.startsWith(`onnxtrain-${PAGE}-`) && name !== NAME) await caches.delete(name);
      await worker.clients.claim();
    })(),
  );
});

worker.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET" || new URL(event.request.url).origin !== location.origin) return;
  event.respondWith(
    (async () => {
      // `?threads=2` is the same page.
      const found = await caches
        .open(NAME)
        .then((cache) => cache.match(event.request, { ignoreSearch: true }))
        .catch(() => undefined);
      return found ?? fetch(event.request);
    })(),
  );
});
