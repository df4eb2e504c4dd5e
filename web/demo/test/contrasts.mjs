/** Measures how readable a page is. */

/** In the page: per visible text its contrast with what is behind it, by WCAG 2.2. */
export function contrasts() {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const pixel = (colors) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const color of colors) {
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((byte) => {
      const value = byte / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
    const style = getComputedStyle(element);
    if (!text.length || element.closest(":disabled, .button:has(:disabled)") || !element.checkVisibility()) continue;
    if (["SCRIPT", "STYLE", "desc"].includes(element.nodeName)) continue;
    const behind = [];
    for (let above = element; above; above = above.parentElement)
      behind.unshift(getComputedStyle(above).backgroundColor);
    // In forced colours browsers put a plate of the page's colour behind each text.
    if (matchMedia("(forced-colors: active)").matches && style.forcedColorAdjust === "auto")
      behind.push(getComputedStyle(document.body).backgroundColor);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const [light, dark] = [pixel(behind), pixel([...behind, color])].map(luminance).sort((a, b) => b - a);
    found.push([(light + 0.05) / (dark + 0.05), text[0].data.trim()]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}
