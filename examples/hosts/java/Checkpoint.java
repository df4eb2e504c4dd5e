import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The state of a run, which checkpoints and deltas hold (docs/reference/file-formats.md, "The checkpoint"). */
final class Checkpoint {
  private static final String FORMAT = "onnxtrain-checkpoint";
  private static final String DELTA_FORMAT = "onnxtrain-checkpoint-delta";

  /** What a file must hold under a key: a tensor, and the input of the models that it becomes. */
  private static final class Spec {
    final String input;
    final String dtype;
    final long[] shape;
    final double initial;

    Spec(String input, Map<String, Object> entry, double initial) {
      this.input = input;
      this.dtype = Json.text(entry.get("dtype"));
      this.shape = Json.sizes(entry.get("shape"));
      this.initial = initial;
    }
  }

  /** Parameters, statistics and moments by the inputs of the models, e.g. "fc.weight_momentum0". */
  final Map<String, Tensor> values = new HashMap<>();
  /** Optimizer steps taken. */
  long step = 0;

  private final Map<String, Object> manifest;
  private final Map<String, String> metadata = new LinkedHashMap<>();
  private final Map<String, Spec> specs = new LinkedHashMap<>();
  private final Map<String, Spec> frozen = new LinkedHashMap<>();
  private final Map<String, Spec> moments = new LinkedHashMap<>();
  private Map<String, Object> progress = null;

  Checkpoint(Map<String, Object> manifest) {
    this.manifest = manifest;
    for (String kind : List.of("parameter", "statistic")) {
      for (Map<String, Object> entry : entries(manifest, kind + "s")) {
        String name = Json.text(entry.get("name"));
        Spec spec = new Spec(name, entry, 0);
        specs.put(kind + "/" + name, spec);
        if (Boolean.FALSE.equals(entry.get("trainable"))) frozen.put(kind + "/" + name, spec);
      }
    }
    Map<String, Object> optimizer = Json.object(manifest.get("optimizer"));
    List<Object> names = Json.list(optimizer.get("moments"));
    List<Object> initial = Json.list(optimizer.get("initial_values"));
    for (Map<String, Object> entry : entries(optimizer, "states")) {
      String moment = Json.text(entry.get("moment"));
      String parameter = Json.text(entry.get("parameter"));
      double value = Json.number(initial.get(names.indexOf(moment)));
      moments.put(moment + "/" + parameter, new Spec(parameter + "_" + moment, entry, value));
    }
  }

  static List<Map<String, Object>> entries(Map<String, Object> object, String key) {
    List<Map<String, Object>> entries = new ArrayList<>();
    // Artifacts of earlier versions have no host inputs.
    for (Object entry : Json.list(object.getOrDefault(key, List.of()))) entries.add(Json.object(entry));
    return entries;
  }

  /** Takes over a checkpoint, or a delta on top of the present values; throws, and changes nothing, if it does not fit. */
  void load(Path path) {
    Safetensors file;
    Map<String, Object> read;
    try {
      file = Safetensors.read(path);
      read = check(file);
    } catch (IOException | RuntimeException error) {
      throw new IllegalArgumentException("the checkpoint '" + path + "' cannot be used: " + Host.messageOf(error), error);
    }
    // Nothing has changed up to here.
    specs.forEach((key, spec) -> {
      if (file.tensors.containsKey(key)) values.put(spec.input, file.tensors.get(key));
    });
    moments.forEach((key, spec) -> values.put(
        spec.input, read == null ? Tensor.filled(spec.dtype, spec.shape, spec.initial) : file.tensors.get(key)));
    metadata.putAll(file.metadata);
    metadata.keySet().removeAll(List.of("format", "frozen"));
    progress = read;
    step = read == null ? 0 : Json.integer(read.get("step"));
  }

  /** Throws unless a file fits the model and the present state; returns the progress of its optimizer, or null. */
  private Map<String, Object> check(Safetensors file) {
    boolean delta = DELTA_FORMAT.equals(file.metadata.get("format"));
    require(delta || FORMAT.equals(file.metadata.get("format")), "it is no checkpoint of onnxtrain");
    require("1".equals(file.metadata.get("version")), "it has version " + file.metadata.get("version") + ", not 1");
    require(manifest.get("fingerprint").equals(file.metadata.get("fingerprint")), "it belongs to another model");
    require(!delta || !values.isEmpty(), "it is a delta, which goes on top of a checkpoint");
    Object parsed = Json.parse(file.metadata.getOrDefault("optimizer", "null"));
    Map<String, Object> read = parsed == null ? null : Json.object(parsed);
    if (read != null) {
      long taken = Json.integer(read.get("step"));
      boolean good = taken >= 0 && taken < 1L << 62;
      for (String key : List.of("learning_rate", "initial_learning_rate")) {
        double rate = Json.number(read.get(key));
        good &= rate >= 0 && rate < Double.POSITIVE_INFINITY;
      }
      require(good, "its optimizer is at " + Json.write(read));
    }
    Map<String, Spec> expected = new LinkedHashMap<>(specs);
    if (delta) expected.keySet().removeAll(frozen.keySet());
    if (read != null) expected.putAll(moments);
    expected.forEach((key, spec) -> {
      Tensor tensor = file.tensors.get(key);
      require(tensor != null, "it lacks '" + key + "'");
      String wanted = spec.dtype + Json.write(spec.shape);
      require(tensor.signature().equals(wanted), "'" + key + "' is " + tensor.signature() + ", the model has " + wanted);
    });
    for (String key : file.tensors.keySet()) {
      require(expected.containsKey(key), "the model has no '" + key + "'; perhaps it had another optimizer");
    }
    require(!delta || frozenDigest().equals(file.metadata.get("frozen")),
        "it was trained on top of other values of the frozen parameters");
    return read;
  }

  /** Writes a checkpoint, or a delta: the trained parameters, the statistics and the moments only. */
  void save(Path path, double rate, boolean delta) throws IOException {
    Safetensors file = new Safetensors();
    for (Map<String, Spec> group : List.of(specs, moments)) {
      group.forEach((key, spec) -> {
        if (!delta || !frozen.containsKey(key)) file.tensors.put(key, values.get(spec.input));
      });
    }
    Map<String, Object> reached = new LinkedHashMap<>();
    reached.put("initial_learning_rate", rate);
    if (progress != null) reached.putAll(progress);
    reached.put("step", step);
    reached.put("learning_rate", rate);
    List<Object> order = new ArrayList<>();
    List<Object> trainable = new ArrayList<>();
    for (Map<String, Object> entry : entries(manifest, "parameters")) {
      order.add(entry.get("name"));
      if (Boolean.TRUE.equals(entry.get("trainable"))) trainable.add(entry.get("name"));
    }
    // The texts that were read, so that no number in `properties` is rounded.
    file.metadata.putAll(metadata);
    file.metadata.put("format", delta ? DELTA_FORMAT : FORMAT);
    file.metadata.put("optimizer", Json.write(reached));
    file.metadata.put("trainable", Json.write(trainable));
    if (delta) {
      file.metadata.keySet().removeAll(List.of("order", "nominal"));
      file.metadata.put("frozen", frozenDigest());
    } else {
      file.metadata.put("order", Json.write(order));
      file.metadata.put("nominal", "false");
    }
    file.write(path);
  }

  /** Computes the digest of the frozen parameters, in the order of the code points of their names. */
  private String frozenDigest() {
    List<Spec> sorted = new ArrayList<>(frozen.values());
    sorted.sort((a, b) -> Arrays.compareUnsigned(utf8(a.input), utf8(b.input)));
    try {
      MessageDigest digest = MessageDigest.getInstance("SHA-256");
      for (Spec spec : sorted) {
        digest.update(utf8(Json.write(List.of(spec.input, spec.dtype, spec.shape))));
        digest.update(values.get(spec.input).bytes);
      }
      return DataFiles.hexadecimal(digest.digest());
    } catch (NoSuchAlgorithmException error) {
      throw new IllegalStateException(error);
    }
  }

  private static byte[] utf8(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  private static void require(boolean condition, String message) {
    if (!condition) throw new IllegalArgumentException(message);
  }
}
