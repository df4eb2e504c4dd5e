/** The camera. */

/** Returns why there is no picture of a camera, and what to do. */
function reason(error: unknown): string {
  const photos = "add photos as files instead.";
  switch ((error as Error | null)?.name) {
    case "NotAllowedError":
      return `The camera is not allowed here: allow it in the browser's settings for this page, or ${photos}`;
    case "NotFoundError":
    case "OverconstrainedError":
      return `There is no camera: connect one, or ${photos}`;
    case "NotReadableError":
    case "AbortError":
      return `Another program has the camera: close it, or ${photos}`;
    default:
      return `This browser gives no camera to this page, for example because it came without HTTPS: ${photos}`;
  }
}

/** Shows what a camera sees in a video element. */
export class Camera {
  /** Called when the camera is unplugged, or taken away. */
  onEnd: () => void = () => {};
  readonly #video: HTMLVideoElement;
  #stream: MediaStream | null = null;
  #facing: "user" | "environment" = "user";

  constructor(video: HTMLVideoElement) {
    this.#video = video;
  }

  get on(): boolean {
    return this.#stream !== null && this.#video.videoWidth > 0;
  }

  /** Starts the camera, or changes to the one on the other side of a phone; the message of an error says why it cannot. */
  async start(other = false): Promise<void> {
    if (other) this.#facing = this.#facing === "user" ? "environment" : "user";
    this.stop();
    try {
      const video = { facingMode: this.#facing, width: { ideal: 640 }, height: { ideal: 480 } };
      const stream = await navigator.mediaDevices.getUserMedia({ video });
      this.#stream = stream;
      this.#video.srcObject = stream;
      // As in a mirror, unless the camera looks at what the user looks at.
      const [track] = stream.getVideoTracks();
      this.#video.classList.toggle("mirrored", track?.getSettings().facingMode !== "environment");
      track?.addEventListener("ended", () => {
        this.stop();
        this.onEnd();
      });
      // Some browsers play no video that is hidden.
      this.#video.hidden = false;
      await this.#video.play();
    } catch (error) {
      this.stop();
      console.info(error);
      throw new Error(reason(error));
    }
  }

  stop(): void {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#stream = this.#video.srcObject = null;
  }

  /** True if there is more than one camera, known once one has been started. */
  async hasOther(): Promise<boolean> {
    const devices = await navigator.mediaDevices.enumerateDevices().catch(() => []);
    return devices.filter(({ kind }) => kind === "videoinput").length > 1;
  }
}
