using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;

/// <summary>The batches of a run (docs/devices/test-your-host.md), checked by the manifest before a step sees them.</summary>
sealed class Feeds
{
    public readonly long Steps;
    public readonly double LearningRate;
    public readonly long Seed;
    readonly List<Dictionary<string, object>> specs;
    readonly List<Dictionary<string, object>> given;
    readonly byte[] data;
    long place;

    public Feeds(string folder, Dictionary<string, object> manifest)
    {
        Dictionary<string, object> run = ReadJson(Path.Combine(folder, "feeds.json"));
        Steps = Json.Integer(run["steps"]);
        LearningRate = Json.Number(run["learning_rate"]);
        Seed = Json.Integer(Json.Get(run, "seed") ?? 0L);
        given = Json.Objects(run, "feeds");
        specs = Json.Objects(manifest, "inputs").Concat(Json.Objects(manifest, "targets")).ToList();
        CheckForms();
        data = File.ReadAllBytes(Path.Combine(folder, "feeds.bin"));
        long size = given.Sum(feed => Tensor.Size(Json.Text(feed["dtype"]), Json.Sizes(feed["shape"])));
        if (size * Steps != data.Length)
            throw new FormatException("feeds.bin has " + data.Length + " bytes, " + Steps + " steps have " + size * Steps);
    }

    public static Dictionary<string, object> ReadJson(string path)
    {
        try
        {
            return Json.Object(Json.Parse(File.ReadAllText(path)));
        }
        catch (FormatException error)
        {
            throw new FormatException("'" + path + "': " + error.Message, error);
        }
    }

    /// <summary>Returns the next batch by the names of inputs and targets.</summary>
    public Dictionary<string, Tensor> Next()
    {
        var batch = new Dictionary<string, Tensor>();
        foreach (Dictionary<string, object> feed in given)
        {
            string dtype = Json.Text(feed["dtype"]);
            long[] shape = Json.Sizes(feed["shape"]);
            var bytes = new byte[Tensor.Size(dtype, shape)];
            Array.Copy(data, place, bytes, 0, bytes.Length);
            place += bytes.Length;
            var tensor = new Tensor(dtype, shape, bytes);
            CheckValues(specs[batch.Count], tensor);
            batch[Json.Text(feed["name"])] = tensor;
        }
        return batch;
    }

    /// <summary>Throws unless names, dtypes and shapes are those of the manifest, and no batch is empty.</summary>
    void CheckForms()
    {
        Func<Dictionary<string, object>, string> show = x => Json.Get(x, "name") + " (" + Json.Get(x, "dtype") + ")";
        string wanted = string.Join(", ", specs.Select(show)), received = string.Join(", ", given.Select(show));
        if (wanted != received) throw new FormatException("feeds.json lists " + received + ", the model takes " + wanted);
        var symbols = new Dictionary<string, long>();
        for (int index = 0; index < specs.Count; index++)
        {
            Dictionary<string, object> spec = specs[index];
            long[] shape = Json.Sizes(given[index]["shape"]);
            Require(shape.Length == 0 || shape[0] > 0, spec, "the batch is empty; pass at least one sample");
            if (Json.Get(spec, "shape") == null) continue;
            List<object> sizes = Json.List(spec["shape"]);
            bool fits = sizes.Count == shape.Length;
            for (int axis = 0; fits && axis < shape.Length; axis++)
            {
                // Texts are symbolic sizes: any number, but the same one in all inputs.
                if (sizes[axis] is string symbol && symbol.Length > 0)
                {
                    if (!symbols.ContainsKey(symbol)) symbols[symbol] = shape[axis];
                    fits = symbols[symbol] == shape[axis];
                }
                else if (sizes[axis] is long size) fits = size == shape[axis];
            }
            Require(fits, spec, "received shape " + Json.Write(shape) + ", the model takes " + Json.Write(sizes));
        }
    }

    /// <summary>
    /// Throws if a number is NaN, or a label neither a class nor the ignored label. Infinity is allowed: masks hold it.
    /// </summary>
    static void CheckValues(Dictionary<string, object> spec, Tensor tensor)
    {
        for (int index = 0; tensor.IsFloat && index < tensor.Count; index++)
            Require(!double.IsNaN(tensor.Real(index)), spec, "NaN at position " + index + "; leave out or fill such samples");
        if (Json.Get(spec, "class_labels") == null) return;
        Dictionary<string, object> labels = Json.Object(spec["class_labels"]);
        object count = Json.Get(labels, "count"), ignored = Json.Get(labels, "ignore_index");
        for (int index = 0; index < tensor.Count; index++)
        {
            long label = tensor.Integer(index);
            bool known = label >= 0 && (count == null || label < Json.Integer(count));
            string allowed = count == null ? "0 or more" : "0 to " + (Json.Integer(count) - 1);
            Require(known || (ignored != null && label == Json.Integer(ignored)), spec, "received the label " + label
                + "; labels are " + allowed + (ignored == null ? "" : ", or " + ignored + " to ignore an element"));
        }
    }

    static void Require(bool condition, Dictionary<string, object> spec, string problem)
    {
        if (!condition) throw new FormatException("input '" + spec["name"] + "': " + problem);
    }
}
