import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The batches of a run (docs/devices/test-your-host.md), checked by the manifest before a step sees them. */
final class Feeds {
  final int steps;
  final double learningRate;
  final long seed;
  private final List<Map<String, Object>> specs;
  private final List<Map<String, Object>> given;
  private final byte[] data;
  private int place = 0;

  Feeds(Path folder, Map<String, Object> manifest) throws IOException {
    Map<String, Object> run = readJson(folder.resolve("feeds.json"));
    steps = Math.toIntExact(Json.integer(run.get("steps")));
    learningRate = Json.number(run.get("learning_rate"));
    seed = Json.integer(run.getOrDefault("seed", 0L));
    given = Checkpoint.entries(run, "feeds");
    specs = new ArrayList<>(Checkpoint.entries(manifest, "inputs"));
    specs.addAll(Checkpoint.entries(manifest, "targets"));
    checkForms();
    data = Files.readAllBytes(folder.resolve("feeds.bin"));
    long size = 0;
    for (Map<String, Object> feed : given) size += Tensor.size(Json.text(feed.get("dtype")), Json.sizes(feed.get("shape")));
    if (size * steps != data.length) {
      throw new IllegalArgumentException("feeds.bin has " + data.length + " bytes, " + steps + " steps have " + size * steps);
    }
  }

  static Map<String, Object> readJson(Path path) throws IOException {
    try {
      return Json.object(Json.parse(new String(Files.readAllBytes(path), StandardCharsets.UTF_8)));
    } catch (IllegalArgumentException error) {
      throw new IllegalArgumentException("'" + path + "': " + error.getMessage(), error);
    }
  }

  /** Returns the next batch by the names of inputs and targets. */
  Map<String, Tensor> next() {
    Map<String, Tensor> batch = new LinkedHashMap<>();
    for (int index = 0; index < specs.size(); index++) {
      String dtype = Json.text(given.get(index).get("dtype"));
      long[] shape = Json.sizes(given.get(index).get("shape"));
      int end = place + (int) Tensor.size(dtype, shape);
      Tensor tensor = new Tensor(dtype, shape, Arrays.copyOfRange(data, place, end));
      checkValues(specs.get(index), tensor);
      batch.put(Json.text(specs.get(index).get("name")), tensor);
      place = end;
    }
    return batch;
  }

  /** Throws unless names, dtypes and shapes are those of the manifest, and no batch is empty. */
  private void checkForms() {
    List<String> wanted = new ArrayList<>();
    List<String> received = new ArrayList<>();
    for (Map<String, Object> spec : specs) wanted.add(spec.get("name") + " (" + spec.get("dtype") + ")");
    for (Map<String, Object> feed : given) received.add(feed.get("name") + " (" + feed.get("dtype") + ")");
    if (!wanted.equals(received)) {
      throw new IllegalArgumentException("feeds.json lists " + received + ", the model takes " + wanted);
    }
    Map<String, Long> symbols = new HashMap<>();
    for (int index = 0; index < specs.size(); index++) {
      Map<String, Object> spec = specs.get(index);
      long[] shape = Json.sizes(given.get(index).get("shape"));
      require(shape.length == 0 || shape[0] > 0, spec, "the batch is empty; pass at least one sample");
      if (spec.get("shape") == null) continue;
      List<Object> sizes = Json.list(spec.get("shape"));
      boolean fits = sizes.size() == shape.length;
      for (int axis = 0; fits && axis < shape.length; axis++) {
        Object size = sizes.get(axis);
        // Texts are symbolic sizes: any number, but the same one in all inputs.
        if (size instanceof String && !((String) size).isEmpty()) {
          symbols.putIfAbsent((String) size, shape[axis]);
          fits = symbols.get(size) == shape[axis];
        } else if (size instanceof Long) {
          fits = (Long) size == shape[axis];
        }
      }
      require(fits, spec, "received shape " + Json.write(shape) + ", the model takes " + Json.write(sizes));
    }
  }

  /** Throws if a number is NaN, or a label neither a class nor the ignored label. Infinity is allowed: masks hold it. */
  private static void checkValues(Map<String, Object> spec, Tensor tensor) {
    for (int index = 0; tensor.isFloat() && index < tensor.count(); index++) {
      require(!Double.isNaN(tensor.real(index)), spec, "NaN at position " + index + "; leave out or fill such samples");
    }
    if (spec.get("class_labels") == null) return;
    Map<String, Object> labels = Json.object(spec.get("class_labels"));
    Object count = labels.get("count");
    Object ignored = labels.get("ignore_index");
    for (int index = 0; index < tensor.count(); index++) {
      long label = tensor.integer(index);
      boolean known = label >= 0 && (count == null || label < Json.integer(count));
      require(known || (ignored != null && label == Json.integer(ignored)), spec,
          "received the label " + label + "; labels are 0 to " + (count == null ? "any" : Json.integer(count) - 1)
              + (ignored == null ? "" : ", or " + ignored + " to ignore an element"));
    }
  }

  private static void require(boolean condition, Map<String, Object> spec, String problem) {
    if (!condition) throw new IllegalArgumentException("input '" + spec.get("name") + "': " + problem);
  }
}
