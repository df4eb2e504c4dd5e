package ai.onnxruntime;

public final class OrtEnvironment implements AutoCloseable {
  private static final OrtEnvironment ENVIRONMENT = new OrtEnvironment();

  private OrtEnvironment() {}

  public static OrtEnvironment getEnvironment() {
    return ENVIRONMENT;
  }

  public OrtSession createSession(String modelPath, OrtSession.SessionOptions options) throws OrtException {
    return new OrtSession(modelPath);
  }

  @Override
  public void close() {}
}
