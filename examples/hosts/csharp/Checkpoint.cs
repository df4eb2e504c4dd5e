using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Security.Cryptography;
using System.Text;

/// <summary>The state of a run, which checkpoints and deltas hold (docs/reference/file-formats.md, "The checkpoint").</summary>
sealed class Checkpoint
{
    const string Format = "onnxtrain-checkpoint";
    const string DeltaFormat = "onnxtrain-checkpoint-delta";

    /// <summary>What a file must hold under a key: a tensor, and the input of the models that it becomes.</summary>
    sealed class Spec
    {
        public readonly string Input;
        public readonly string DType;
        public readonly long[] Shape;
        public readonly double Initial;

        public Spec(string input, Dictionary<string, object> entry, double initial)
        {
            Input = input;
            DType = Json.Text(entry["dtype"]);
            Shape = Json.Sizes(entry["shape"]);
            Initial = initial;
        }

        public string Signature
        {
            get { return DType + Json.Write(Shape); }
        }
    }

    /// <summary>Parameters, statistics and moments by the inputs of the models, e.g. "fc.weight_momentum0".</summary>
    public readonly Dictionary<string, Tensor> Values = new Dictionary<string, Tensor>();

    /// <summary>Optimizer steps taken.</summary>
    public long Step;

    readonly Dictionary<string, object> manifest;
    readonly Dictionary<string, string> metadata = new Dictionary<string, string>();
    readonly Dictionary<string, Spec> specs = new Dictionary<string, Spec>();
    readonly Dictionary<string, Spec> frozen = new Dictionary<string, Spec>();
    readonly Dictionary<string, Spec> moments = new Dictionary<string, Spec>();
    Dictionary<string, object> progress;

    public Checkpoint(Dictionary<string, object> manifest)
    {
        this.manifest = manifest;
        foreach (string kind in new[] { "parameter", "statistic" })
        {
            foreach (Dictionary<string, object> entry in Json.Objects(manifest, kind + "s"))
            {
                string name = Json.Text(entry["name"]);
                var spec = new Spec(name, entry, 0);
                specs[kind + "/" + name] = spec;
                if (false.Equals(Json.Get(entry, "trainable"))) frozen[kind + "/" + name] = spec;
            }
        }
        Dictionary<string, object> optimizer = Json.Object(manifest["optimizer"]);
        List<object> names = Json.List(optimizer["moments"]), initial = Json.List(optimizer["initial_values"]);
        foreach (Dictionary<string, object> entry in Json.Objects(optimizer, "states"))
        {
            string moment = Json.Text(entry["moment"]), parameter = Json.Text(entry["parameter"]);
            double value = Json.Number(initial[names.IndexOf(moment)]);
            moments[moment + "/" + parameter] = new Spec(parameter + "_" + moment, entry, value);
        }
    }

    /// <summary>
    /// Takes over a checkpoint, or a delta on top of the present values; throws, and changes nothing, if it does not fit.
    /// </summary>
    public void Load(string path)
    {
        Safetensors file;
        Dictionary<string, object> read;
        try
        {
            file = Safetensors.Read(path);
            read = Check(file);
        }
        catch (Exception error)
        {
            throw new FormatException("the checkpoint '" + path + "' cannot be used: " + error.Message, error);
        }
        // Nothing has changed up to here.
        foreach (KeyValuePair<string, Spec> entry in specs)
            if (file.Tensors.TryGetValue(entry.Key, out Tensor tensor)) Values[entry.Value.Input] = tensor;
        foreach (KeyValuePair<string, Spec> entry in moments)
        {
            Spec spec = entry.Value;
            Values[spec.Input] = read == null ? Tensor.Filled(spec.DType, spec.Shape, spec.Initial) : file.Tensors[entry.Key];
        }
        foreach (KeyValuePair<string, string> entry in file.Metadata)
            if (entry.Key != "format" && entry.Key != "frozen") metadata[entry.Key] = entry.Value;
        progress = read;
        Step = read == null ? 0 : Json.Integer(read["step"]);
    }

    /// <summary>
    /// Throws unless a file fits the model and the present state; returns the progress of its optimizer, or null.
    /// </summary>
    Dictionary<string, object> Check(Safetensors file)
    {
        string format = Entry(file, "format");
        bool delta = format == DeltaFormat;
        Require(delta || format == Format, "it is no checkpoint of onnxtrain");
        Require(Entry(file, "version") == "1", "it has version " + Entry(file, "version") + ", not 1");
        Require(Entry(file, "fingerprint") == Json.Text(manifest["fingerprint"]), "it belongs to another model");
        Require(!delta || Values.Count > 0, "it is a delta, which goes on top of a checkpoint");
        object parsed = Json.Parse(Entry(file, "optimizer") ?? "null");
        Dictionary<string, object> read = parsed == null ? null : Json.Object(parsed);
        if (read != null)
        {
            long taken = Json.Integer(Json.Get(read, "step"));
            double[] rates = { Json.Number(Json.Get(read, "learning_rate")), Json.Number(Json.Get(read, "initial_learning_rate")) };
            bool good = taken >= 0 && taken < 1L << 62 && rates.All(rate => rate >= 0 && rate < double.PositiveInfinity);
            Require(good, "its optimizer is at " + Json.Write(read));
        }
        Dictionary<string, Spec> expected = specs.Where(x => !delta || !frozen.ContainsKey(x.Key))
            .Concat(moments.Where(x => read != null)).ToDictionary(x => x.Key, x => x.Value);
        foreach (KeyValuePair<string, Spec> entry in expected)
        {
            Require(file.Tensors.ContainsKey(entry.Key), "it lacks '" + entry.Key + "'");
            string received = file.Tensors[entry.Key].Signature, wanted = entry.Value.Signature;
            Require(received == wanted, "'" + entry.Key + "' is " + received + ", the model has " + wanted);
        }
        foreach (string key in file.Tensors.Keys)
            Require(expected.ContainsKey(key), "the model has no '" + key + "'; perhaps it had another optimizer");
        Require(!delta || Entry(file, "frozen") == FrozenDigest(),
            "it was trained on top of other values of the frozen parameters");
        return read;
    }

    /// <summary>Writes a checkpoint, or a delta: the trained parameters, the statistics and the moments only.</summary>
    public void Save(string path, double rate, bool delta)
    {
        var file = new Safetensors();
        foreach (KeyValuePair<string, Spec> entry in specs.Concat(moments))
            if (!delta || !frozen.ContainsKey(entry.Key)) file.Tensors[entry.Key] = Values[entry.Value.Input];
        var reached = new Dictionary<string, object> { { "initial_learning_rate", rate } };
        foreach (KeyValuePair<string, object> entry in progress ?? new Dictionary<string, object>()) reached[entry.Key] = entry.Value;
        reached["step"] = Step;
        reached["learning_rate"] = rate;
        List<Dictionary<string, object>> parameters = Json.Objects(manifest, "parameters");
        // The texts that were read, so that no number in `properties` is rounded.
        foreach (KeyValuePair<string, string> entry in metadata) file.Metadata[entry.Key] = entry.Value;
        file.Metadata["format"] = delta ? DeltaFormat : Format;
        file.Metadata["optimizer"] = Json.Write(reached);
        file.Metadata["trainable"] = Json.Write(parameters.Where(x => true.Equals(x["trainable"])).Select(x => x["name"]));
        if (delta)
        {
            file.Metadata.Remove("order");
            file.Metadata.Remove("nominal");
            file.Metadata["frozen"] = FrozenDigest();
        }
        else
        {
            file.Metadata["order"] = Json.Write(parameters.Select(x => x["name"]));
            file.Metadata["nominal"] = "false";
        }
        file.Write(path);
    }

    /// <summary>Computes the digest of the frozen parameters, in the order of the code points of their names.</summary>
    string FrozenDigest()
    {
        using (var content = new MemoryStream())
        using (SHA256 digest = SHA256.Create())
        {
            // The hexadecimal digits of UTF-8 sort as the code points do.
            foreach (Spec spec in frozen.Values.OrderBy(spec => DataFiles.Hexadecimal(Encoding.UTF8.GetBytes(spec.Input)), StringComparer.Ordinal))
            {
                byte[] signature = Encoding.UTF8.GetBytes(Json.Write(new object[] { spec.Input, spec.DType, spec.Shape }));
                byte[] bytes = Values[spec.Input].Bytes;
                content.Write(signature, 0, signature.Length);
                content.Write(bytes, 0, bytes.Length);
            }
            content.Position = 0;
            return DataFiles.Hexadecimal(digest.ComputeHash(content));
        }
    }

    static string Entry(Safetensors file, string key)
    {
        return file.Metadata.TryGetValue(key, out string text) ? text : null;
    }

    static void Require(bool condition, string message)
    {
        if (!condition) throw new FormatException(message);
    }
}
