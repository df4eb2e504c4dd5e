using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;
using TensorElementType = Microsoft.ML.OnnxRuntime.Tensors.TensorElementType;

/// <summary>
/// Trains artifacts of onnxtrain with ONNX Runtime's C# API, as their manifest says (docs/devices/own-host.md):
/// <c>dotnet run --project examples/hosts/csharp -- ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta]</c>
/// prints one loss per step.
/// </summary>
sealed class Program
{
    static readonly Dictionary<string, TensorElementType> Types = new Dictionary<string, TensorElementType>
    {
        { "float32", TensorElementType.Float }, { "float64", TensorElementType.Double }, { "float16", TensorElementType.Float16 },
        { "int64", TensorElementType.Int64 }, { "int32", TensorElementType.Int32 }, { "int16", TensorElementType.Int16 },
        { "int8", TensorElementType.Int8 }, { "uint8", TensorElementType.UInt8 }, { "bool", TensorElementType.Bool },
    };

    readonly Dictionary<string, object> manifest, optimizer;
    readonly InferenceSession training, update;
    readonly List<string> trainingInputs = new List<string>(), trainingOutputs = new List<string>();
    readonly List<string> updateInputs = new List<string>(), updateOutputs = new List<string>();
    /// <summary>From outputs of the training model to inputs of the optimizer model.</summary>
    readonly Dictionary<string, string> gradients = new Dictionary<string, string>();
    readonly Checkpoint checkpoint;

    Program(string artifacts, Dictionary<string, object> manifest)
    {
        this.manifest = manifest;
        optimizer = Json.Object(manifest["optimizer"]);
        Dictionary<string, object> files = Json.Object(manifest["files"]);
        checkpoint = new Checkpoint(manifest);
        checkpoint.Load(Path.Combine(artifacts, Json.Text(files["checkpoint"])));
        foreach (string group in new[] { "inputs", "targets", "parameters", "statistics", "host_inputs" })
            trainingInputs.AddRange(Json.Objects(manifest, group).Select(entry => Json.Text(entry["name"])));
        trainingOutputs.Add(Json.Text(manifest["loss"]));
        updateInputs.Add(Json.Text(optimizer["learning_rate"]));
        updateInputs.Add(Json.Text(optimizer["step"]));
        foreach (Dictionary<string, object> parameter in Json.Objects(manifest, "parameters"))
        {
            if (!true.Equals(parameter["trainable"])) continue;
            string name = Json.Text(parameter["name"]);
            AddUpdated(name);
            gradients[Json.Text(parameter["gradient"])] = name + "_grad";
            object rows = Json.Get(parameter, "gradient_indices");
            if (rows != null) gradients[Json.Text(rows)] = name + "_grad_indices";
        }
        trainingOutputs.AddRange(gradients.Keys);
        updateInputs.AddRange(gradients.Values);
        trainingOutputs.AddRange(Json.Objects(manifest, "statistics").Select(entry => Json.Text(entry["output"])));
        foreach (Dictionary<string, object> state in Json.Objects(optimizer, "states"))
            AddUpdated(state["parameter"] + "_" + state["moment"]);
        training = new InferenceSession(Path.Combine(artifacts, Json.Text(files["training_model"])));
        update = new InferenceSession(Path.Combine(artifacts, Json.Text(files["optimizer_model"])));
    }

    void AddUpdated(string name)
    {
        updateInputs.Add(name);
        updateOutputs.Add(name + "_updated");
    }

    /// <summary>
    /// Takes a step and returns its loss; throws, and changes no parameter, if the loss or a gradient is not finite.
    /// </summary>
    double Step(Dictionary<string, Tensor> batch, double rate, long seed)
    {
        var values = new Dictionary<string, Tensor>(checkpoint.Values);
        foreach (KeyValuePair<string, Tensor> entry in batch) values[entry.Key] = entry.Value;
        foreach (Dictionary<string, object> input in Json.Objects(manifest, "host_inputs"))
        {
            long[] numbers = Json.List(input["holds"]).Select(name => HostValue(Json.Text(name), seed)).ToArray();
            values[Json.Text(input["name"])] = Tensor.Of(new long[] { numbers.Length }, numbers);
        }
        Dictionary<string, Tensor> results = Run(training, trainingInputs, trainingOutputs, values);
        double loss = results[trainingOutputs[0]].Real(0);
        if (double.IsNaN(loss) || double.IsInfinity(loss))
            throw new FormatException("the loss is " + loss + ": lower the learning rate, or leave this batch out");
        foreach (KeyValuePair<string, string> gradient in gradients)
        {
            Tensor tensor = results[gradient.Key];
            // A finite loss may have gradients of NaN, above all where inputs are infinite.
            if (tensor.IsFloat && !tensor.IsFinite)
                throw new FormatException("the gradient '" + gradient.Key + "' is NaN or infinite: lower the learning rate, or leave this batch out");
            values[gradient.Value] = tensor;
        }
        values[updateInputs[0]] = Tensor.Of((float)rate);
        values[updateInputs[1]] = Tensor.Of(new long[0], checkpoint.Step + 1);
        Dictionary<string, Tensor> updated = Run(update, updateInputs, updateOutputs, values);
        // Both models have run: from here on nothing fails.
        foreach (Dictionary<string, object> statistic in Json.Objects(manifest, "statistics"))
            checkpoint.Values[Json.Text(statistic["name"])] = results[Json.Text(statistic["output"])];
        foreach (KeyValuePair<string, Tensor> entry in updated)
            checkpoint.Values[entry.Key.Substring(0, entry.Key.Length - "_updated".Length)] = entry.Value;
        checkpoint.Step++;
        return loss;
    }

    long HostValue(string name, long seed)
    {
        switch (name)
        {
            case "seed": return seed;
            case "step": return checkpoint.Step;
            // Runs of the training model since the last optimizer step: this loop takes a step after each.
            case "run": return 0;
            default: throw new FormatException("the model wants the number '" + name + "', which this program does not know");
        }
    }

    /// <summary>Copies all tensors in each step. An app keeps OrtValues from step to step.</summary>
    static Dictionary<string, Tensor> Run(
        InferenceSession session, List<string> inputs, List<string> outputs, Dictionary<string, Tensor> values)
    {
        var feeds = new List<OrtValue>();
        try
        {
            foreach (string name in inputs)
            {
                Tensor tensor = values[name];
                feeds.Add(OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, Types[tensor.DType], tensor.Shape));
                tensor.Bytes.CopyTo(feeds[feeds.Count - 1].GetTensorMutableRawData());
            }
            using (var options = new RunOptions())
            using (IDisposableReadOnlyCollection<OrtValue> results = session.Run(options, inputs, feeds, outputs))
            {
                var tensors = new Dictionary<string, Tensor>();
                foreach (OrtValue value in results)
                {
                    OrtTensorTypeAndShapeInfo info = value.GetTensorTypeAndShape();
                    string dtype = Types.First(entry => entry.Value == info.ElementDataType).Key;
                    tensors[outputs[tensors.Count]] = new Tensor(dtype, info.Shape, value.GetTensorMutableRawData().ToArray());
                }
                return tensors;
            }
        }
        finally
        {
            foreach (OrtValue feed in feeds) feed.Dispose();
        }
    }

    static void Train(List<string> places, List<string> from, bool delta)
    {
        Dictionary<string, object> manifest = Feeds.ReadJson(Path.Combine(places[0], "manifest.json"));
        if (!"onnxtrain".Equals(Json.Get(manifest, "format")) || Json.Integer(manifest["version"]) > 2)
            throw new FormatException("'" + places[0] + "': manifest.json is none of onnxtrain, or of a newer version");
        if (Json.Get(manifest, "optimizer") == null) throw new FormatException("'" + places[0] + "' has no optimizer model");
        DataFiles.Check(places[0], manifest);
        var feeds = new Feeds(places[1], manifest);
        var program = new Program(places[0], manifest);
        foreach (string file in from) program.checkpoint.Load(file);
        for (long step = 0; step < feeds.Steps; step++)
        {
            double loss = program.Step(feeds.Next(), feeds.LearningRate, feeds.Seed);
            Console.WriteLine(loss.ToString("R", CultureInfo.InvariantCulture));
        }
        if (places.Count == 3) program.checkpoint.Save(places[2], feeds.LearningRate, delta);
    }

    static int Main(string[] arguments)
    {
        List<string> places = new List<string>(), from = new List<string>();
        bool delta = false, good = BitConverter.IsLittleEndian;
        for (int index = 0; index < arguments.Length; index++)
        {
            if (arguments[index] == "--delta") delta = true;
            else if (arguments[index] == "--from" && index + 1 < arguments.Length) from.Add(arguments[++index]);
            else if (arguments[index].StartsWith("--", StringComparison.Ordinal)) good = false;
            else places.Add(arguments[index]);
        }
        good &= places.Count == 3 || (places.Count == 2 && !delta);
        // Before the training, whose result would be lost.
        if (good && places.Count == 3)
            good = !Directory.Exists(places[2]) && Directory.Exists(Path.GetDirectoryName(Path.GetFullPath(places[2])));
        if (!good)
        {
            Console.Error.WriteLine("usage: ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta]; received " + string.Join(" ", arguments));
            return 2;
        }
        try
        {
            Train(places, from, delta);
            return 0;
        }
        catch (Exception error)
        {
            Console.Error.WriteLine("onnxtrain_host: " + error.Message);
            return 1;
        }
    }
}
