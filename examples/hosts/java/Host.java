import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * Trains artifacts of onnxtrain with ONNX Runtime's Java API, as their manifest says (docs/devices/own-host.md).
 *
 * <pre>
 * javac -cp onnxruntime.jar -d build examples/hosts/java/*.java
 * java -cp build:onnxruntime.jar Host ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta]
 * </pre>
 *
 * It prints one loss per step.
 */
public final class Host {
  private static final Map<String, OnnxJavaType> TYPES = Map.of(
      "float32", OnnxJavaType.FLOAT, "float64", OnnxJavaType.DOUBLE, "float16", OnnxJavaType.FLOAT16,
      "int64", OnnxJavaType.INT64, "int32", OnnxJavaType.INT32, "int16", OnnxJavaType.INT16,
      "int8", OnnxJavaType.INT8, "uint8", OnnxJavaType.UINT8, "bool", OnnxJavaType.BOOL);

  private final OrtEnvironment environment = OrtEnvironment.getEnvironment();
  private final Map<String, Object> manifest;
  private final Map<String, Object> optimizer;
  private final OrtSession training;
  private final OrtSession update;
  private final List<String> trainingInputs = new ArrayList<>();
  private final List<String> updateInputs = new ArrayList<>();
  private final Set<String> trainingOutputs = new LinkedHashSet<>();
  private final Set<String> updateOutputs = new LinkedHashSet<>();
  /** From outputs of the training model to inputs of the optimizer model. */
  private final Map<String, String> gradients = new HashMap<>();
  private final Checkpoint checkpoint;

  private Host(Path artifacts, Map<String, Object> manifest) throws OrtException {
    this.manifest = manifest;
    optimizer = Json.object(manifest.get("optimizer"));
    Map<String, Object> files = Json.object(manifest.get("files"));
    checkpoint = new Checkpoint(manifest);
    checkpoint.load(artifacts.resolve(Json.text(files.get("checkpoint"))));
    for (String group : List.of("inputs", "targets", "parameters", "statistics", "host_inputs")) {
      for (Map<String, Object> entry : Checkpoint.entries(manifest, group)) trainingInputs.add(Json.text(entry.get("name")));
    }
    trainingOutputs.add(Json.text(manifest.get("loss")));
    updateInputs.addAll(List.of(Json.text(optimizer.get("learning_rate")), Json.text(optimizer.get("step"))));
    for (Map<String, Object> parameter : Checkpoint.entries(manifest, "parameters")) {
      if (!Boolean.TRUE.equals(parameter.get("trainable"))) continue;
      String name = Json.text(parameter.get("name"));
      addUpdated(name);
      gradients.put(Json.text(parameter.get("gradient")), name + "_grad");
      Object rows = parameter.get("gradient_indices");
      if (rows != null) gradients.put(Json.text(rows), name + "_grad_indices");
    }
    trainingOutputs.addAll(gradients.keySet());
    updateInputs.addAll(gradients.values());
    for (Map<String, Object> statistic : Checkpoint.entries(manifest, "statistics")) {
      trainingOutputs.add(Json.text(statistic.get("output")));
    }
    for (Map<String, Object> state : Checkpoint.entries(optimizer, "states")) {
      addUpdated(state.get("parameter") + "_" + state.get("moment"));
    }
    training = open(artifacts.resolve(Json.text(files.get("training_model"))));
    update = open(artifacts.resolve(Json.text(files.get("optimizer_model"))));
  }

  private void addUpdated(String name) {
    updateInputs.add(name);
    updateOutputs.add(name + "_updated");
  }

  private OrtSession open(Path model) throws OrtException {
    return environment.createSession(model.toString(), new OrtSession.SessionOptions());
  }

  /** Takes a step and returns its loss; throws, and changes no parameter, if the loss or a gradient is not finite. */
  private double step(Map<String, Tensor> batch, double rate, long seed) throws OrtException {
    Map<String, Tensor> values = new HashMap<>(checkpoint.values);
    values.putAll(batch);
    for (Map<String, Object> input : Checkpoint.entries(manifest, "host_inputs")) {
      long[] numbers = Json.list(input.get("holds")).stream().mapToLong(name -> hostValue(Json.text(name), seed)).toArray();
      values.put(Json.text(input.get("name")), Tensor.of(new long[] {numbers.length}, numbers));
    }
    Map<String, Tensor> results = run(training, trainingInputs, trainingOutputs, values);
    double loss = results.get(Json.text(manifest.get("loss"))).real(0);
    if (!Double.isFinite(loss)) {
      throw new IllegalArgumentException("the loss is " + loss + ": lower the learning rate, or leave this batch out");
    }
    gradients.forEach((output, input) -> {
      Tensor gradient = results.get(output);
      // A finite loss may have gradients of NaN, above all where inputs are infinite.
      if (gradient.isFloat() && !gradient.isFinite()) {
        throw new IllegalArgumentException(
            "the gradient '" + output + "' is NaN or infinite: lower the learning rate, or leave this batch out");
      }
      values.put(input, gradient);
    });
    values.put(Json.text(optimizer.get("learning_rate")), Tensor.of((float) rate));
    values.put(Json.text(optimizer.get("step")), Tensor.of(new long[0], checkpoint.step + 1));
    Map<String, Tensor> updated = run(update, updateInputs, updateOutputs, values);
    // Both models have run: from here on nothing fails.
    for (Map<String, Object> statistic : Checkpoint.entries(manifest, "statistics")) {
      checkpoint.values.put(Json.text(statistic.get("name")), results.get(Json.text(statistic.get("output"))));
    }
    updated.forEach((name, tensor) ->
        checkpoint.values.put(name.substring(0, name.length() - "_updated".length()), tensor));
    checkpoint.step++;
    return loss;
  }

  private long hostValue(String name, long seed) {
    switch (name) {
      case "seed": return seed;
      case "step": return checkpoint.step;
      // Runs of the training model since the last optimizer step: this loop takes a step after each.
      case "run": return 0;
      default: throw new IllegalArgumentException("the model wants the number '" + name + "', which this program does not know");
    }
  }

  /** Copies all tensors in each step. An app keeps OnnxTensors from step to step, and closes those that it replaces. */
  private Map<String, Tensor> run(OrtSession session, List<String> inputs, Set<String> outputs, Map<String, Tensor> values)
      throws OrtException {
    Map<String, OnnxTensor> feeds = new HashMap<>();
    try {
      for (String name : inputs) {
        Tensor tensor = values.get(name);
        // ONNX Runtime reads the memory of a direct buffer, in the order of the processor.
        ByteBuffer buffer = ByteBuffer.allocateDirect(tensor.bytes.length).order(ByteOrder.nativeOrder());
        buffer.put(tensor.bytes).rewind();
        feeds.put(name, OnnxTensor.createTensor(environment, buffer, tensor.shape, TYPES.get(tensor.dtype)));
      }
      try (OrtSession.Result results = session.run(feeds, outputs)) {
        Map<String, Tensor> tensors = new HashMap<>();
        for (Map.Entry<String, OnnxValue> result : results) {
          OnnxTensor value = (OnnxTensor) result.getValue();
          ByteBuffer buffer = value.getByteBuffer();
          byte[] bytes = new byte[buffer.remaining()];
          buffer.get(bytes);
          tensors.put(result.getKey(), new Tensor(dtypeOf(value.getInfo().type), value.getInfo().getShape(), bytes));
        }
        return tensors;
      }
    } finally {
      feeds.values().forEach(OnnxTensor::close);
    }
  }

  private static String dtypeOf(OnnxJavaType type) {
    for (Map.Entry<String, OnnxJavaType> entry : TYPES.entrySet()) if (entry.getValue() == type) return entry.getKey();
    throw new IllegalArgumentException("a tensor has the type " + type + ", which is not supported");
  }

  private static void train(List<Path> places, List<Path> from, boolean delta) throws IOException, OrtException {
    Map<String, Object> manifest = Feeds.readJson(places.get(0).resolve("manifest.json"));
    if (!"onnxtrain".equals(manifest.get("format")) || Json.integer(manifest.get("version")) > 2) {
      throw new IllegalArgumentException("'" + places.get(0) + "': manifest.json is none of onnxtrain, or of a newer version");
    }
    if (manifest.get("optimizer") == null) throw new IllegalArgumentException("'" + places.get(0) + "' has no optimizer model");
    DataFiles.check(places.get(0), manifest);
    Feeds feeds = new Feeds(places.get(1), manifest);
    Host host = new Host(places.get(0), manifest);
    for (Path file : from) host.checkpoint.load(file);
    for (int step = 0; step < feeds.steps; step++) {
      System.out.println(host.step(feeds.next(), feeds.learningRate, feeds.seed));
    }
    if (places.size() == 3) host.checkpoint.save(places.get(2), feeds.learningRate, delta);
  }

  static String messageOf(Throwable error) {
    // The message of a NoSuchFileException is the path alone.
    return error.getMessage() == null || error instanceof IOException ? error.toString() : error.getMessage();
  }

  public static void main(String[] arguments) {
    List<Path> places = new ArrayList<>();
    List<Path> from = new ArrayList<>();
    boolean delta = false;
    boolean good = ByteOrder.nativeOrder() == ByteOrder.LITTLE_ENDIAN;
    for (int index = 0; index < arguments.length; index++) {
      if (arguments[index].equals("--delta")) delta = true;
      else if (arguments[index].equals("--from") && index + 1 < arguments.length) from.add(Paths.get(arguments[++index]));
      else if (arguments[index].startsWith("--")) good = false;
      else places.add(Paths.get(arguments[index]));
    }
    good &= places.size() == 3 || (places.size() == 2 && !delta);
    // Before the training, whose result would be lost.
    if (good && places.size() == 3) {
      Path out = places.get(2).toAbsolutePath();
      good = !Files.isDirectory(out) && Files.isDirectory(out.getParent());
    }
    if (!good) {
      System.err.println("usage: Host ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta]; received " + Arrays.toString(arguments));
      System.exit(2);
    }
    try {
      train(places, from, delta);
    } catch (Exception error) {
      System.err.println("Host: " + messageOf(error));
      System.exit(1);
    }
  }
}
