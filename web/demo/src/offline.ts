/** Keeps the page for visits without a network, by its service worker; `button` updates the page when there is a new version. */
export function keepOffline(button: HTMLElement): void {
  // Not on file: URLs, nor over plain HTTP from another machine.
  if (!("serviceWorker" in navigator)) return;
  navigator.serviceWorker
    .register("sw.js", { type: "module" })
    .then((registration) => {
      const offer = (): void => {
        // Without a controller this is the first version, which does not wait.
        button.hidden = !(registration.waiting && navigator.serviceWorker.controller);
      };
      offer();
      registration.addEventListener("updatefound", () =>
        registration.installing?.addEventListener("statechange", offer),
      );
      button.addEventListener("click", () => {
        // Other tabs go on with the files that they have.
        navigator.serviceWorker.addEventListener("controllerchange", () => location.reload());
        registration.waiting?.postMessage("activate");
      });
    })
    .catch((error: unknown) => console.warn("This page will not work offline:", error));
}
