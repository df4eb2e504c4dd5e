package ai.onnxruntime;

import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Set;

/** Runs models in one process of Python, whose command line is in ORT_SERVER, separated by line feeds. */
public class OrtSession implements AutoCloseable {
  private static DataOutputStream requests;
  private static DataInputStream answers;
  private final String model;

  OrtSession(String model) throws OrtException {
    this.model = model;
    if (requests != null) return;
    try {
      String[] command = System.getenv("ORT_SERVER").split("\n");
      Process process = new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.INHERIT).start();
      requests = new DataOutputStream(new BufferedOutputStream(process.getOutputStream()));
      answers = new DataInputStream(process.getInputStream());
    } catch (IOException error) {
      throw new OrtException(error.toString());
    }
  }

  public Result run(Map<String, ? extends OnnxTensorLike> inputs, Set<String> requestedOutputs) throws OrtException {
    try {
      writeText(model);
      requests.writeInt(inputs.size());
      for (Map.Entry<String, ? extends OnnxTensorLike> input : inputs.entrySet()) {
        OnnxTensor tensor = (OnnxTensor) input.getValue();
        writeText(input.getKey());
        writeText(tensor.getInfo().type.numpy);
        requests.writeInt(tensor.getInfo().getShape().length);
        for (long size : tensor.getInfo().getShape()) requests.writeLong(size);
        byte[] bytes = tensor.getByteBuffer().array();
        requests.writeInt(bytes.length);
        requests.write(bytes);
      }
      requests.writeInt(requestedOutputs.size());
      for (String name : requestedOutputs) writeText(name);
      requests.flush();
      if (answers.readInt() != 0) throw new OrtException(readText());
      Map<String, OnnxValue> results = new LinkedHashMap<>();
      int count = answers.readInt();
      for (int index = 0; index < count; index++) {
        String name = readText();
        OnnxJavaType type = typeOf(readText());
        long[] shape = new long[answers.readInt()];
        for (int axis = 0; axis < shape.length; axis++) shape[axis] = answers.readLong();
        byte[] bytes = answers.readNBytes(answers.readInt());
        ByteBuffer buffer = ByteBuffer.allocateDirect(bytes.length).order(ByteOrder.nativeOrder());
        buffer.put(bytes).rewind();
        results.put(name, new OnnxTensor(buffer, new TensorInfo(type, shape)));
      }
      return new Result(results);
    } catch (IOException error) {
      throw new OrtException("the process of Python has ended: " + error);
    }
  }

  private static OnnxJavaType typeOf(String dtype) {
    for (OnnxJavaType type : OnnxJavaType.values()) if (type.numpy.equals(dtype)) return type;
    return OnnxJavaType.UNKNOWN;
  }

  private void writeText(String text) throws IOException {
    byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
    requests.writeInt(bytes.length);
    requests.write(bytes);
  }

  private String readText() throws IOException {
    return new String(answers.readNBytes(answers.readInt()), StandardCharsets.UTF_8);
  }

  @Override
  public void close() throws OrtException {}

  public static class SessionOptions implements AutoCloseable {
    @Override
    public void close() {}
  }

  public static class Result implements AutoCloseable, Iterable<Map.Entry<String, OnnxValue>> {
    private final Map<String, OnnxValue> values;

    Result(Map<String, OnnxValue> values) {
      this.values = values;
    }

    public Optional<OnnxValue> get(String name) {
      return Optional.ofNullable(values.get(name));
    }

    @Override
    public Iterator<Map.Entry<String, OnnxValue>> iterator() {
      return values.entrySet().iterator();
    }

    @Override
    public void close() {
      values.values().forEach(OnnxValue::close);
    }
  }
}
