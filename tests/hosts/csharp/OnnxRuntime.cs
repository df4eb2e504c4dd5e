// Stands in for the package Microsoft.ML.OnnxRuntime: the members that the example host uses, as they are documented.
// Models run in one process of Python, whose command line is in ORT_SERVER, separated by line feeds.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Net;
using System.Text;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace Microsoft.ML.OnnxRuntime.Tensors
{
    public enum TensorElementType { Float = 1, UInt8 = 2, Int8 = 3, Int16 = 5, Int32 = 6, Int64 = 7, Bool = 9, Float16 = 10, Double = 11 }
}

namespace Microsoft.ML.OnnxRuntime
{
    public interface IDisposableReadOnlyCollection<out T> : IReadOnlyCollection<T>, IDisposable { }

    public class OnnxRuntimeException : Exception
    {
        internal OnnxRuntimeException(string message) : base(message) { }
    }

    public class RunOptions : IDisposable
    {
        public void Dispose() { }
    }

    public class OrtAllocator : IDisposable
    {
        public static OrtAllocator DefaultInstance { get; } = new OrtAllocator();

        public void Dispose() { }
    }

    public struct OrtTensorTypeAndShapeInfo
    {
        public TensorElementType ElementDataType { get; internal set; }
        public long[] Shape { get; internal set; }
    }

    public class OrtValue : IDisposable
    {
        internal static readonly Dictionary<string, TensorElementType> Types = new Dictionary<string, TensorElementType>
        {
            { "float32", TensorElementType.Float }, { "float64", TensorElementType.Double }, { "float16", TensorElementType.Float16 },
            { "int64", TensorElementType.Int64 }, { "int32", TensorElementType.Int32 }, { "int16", TensorElementType.Int16 },
            { "int8", TensorElementType.Int8 }, { "uint8", TensorElementType.UInt8 }, { "bool", TensorElementType.Bool },
        };
        static readonly Dictionary<string, int> Sizes = new Dictionary<string, int>
        {
            { "float32", 4 }, { "float64", 8 }, { "float16", 2 }, { "int64", 8 }, { "int32", 4 }, { "int16", 2 },
            { "int8", 1 }, { "uint8", 1 }, { "bool", 1 },
        };

        internal readonly string DType;
        internal readonly long[] Dims;
        internal byte[] Data;

        internal OrtValue(string dtype, long[] shape, byte[] data)
        {
            DType = dtype;
            Dims = shape;
            Data = data;
        }

        public static OrtValue CreateAllocatedTensorValue(OrtAllocator allocator, TensorElementType elementType, long[] shape)
        {
            string dtype = Types.First(x => x.Value == elementType).Key;
            // Uninitialised, as the real one.
            byte[] data = Enumerable.Repeat((byte)0xCD, (int)shape.Aggregate((long)Sizes[dtype], (a, b) => a * b)).ToArray();
            return new OrtValue(dtype, shape, data);
        }

        public Span<byte> GetTensorMutableRawData()
        {
            if (Data == null) throw new ObjectDisposedException("OrtValue");
            return new Span<byte>(Data);
        }

        public OrtTensorTypeAndShapeInfo GetTensorTypeAndShape()
        {
            return new OrtTensorTypeAndShapeInfo { ElementDataType = Types[DType], Shape = Dims };
        }

        public void Dispose()
        {
            if (Data == null) throw new ObjectDisposedException("OrtValue");
            Data = null;
        }
    }

    public class InferenceSession : IDisposable
    {
        sealed class Values : List<OrtValue>, IDisposableReadOnlyCollection<OrtValue>
        {
            public void Dispose()
            {
                ForEach(value => value.Dispose());
            }
        }

        static Process process;
        static BinaryWriter requests;
        static BinaryReader answers;
        readonly string model;

        public InferenceSession(string modelPath)
        {
            model = modelPath;
            if (process != null) return;
            string[] command = Environment.GetEnvironmentVariable("ORT_SERVER").Split('\n');
            process = Process.Start(new ProcessStartInfo(command[0], "\"" + string.Join("\" \"", command.Skip(1)) + "\"")
            {
                RedirectStandardInput = true, RedirectStandardOutput = true, UseShellExecute = false,
            });
            requests = new BinaryWriter(process.StandardInput.BaseStream);
            answers = new BinaryReader(process.StandardOutput.BaseStream);
        }

        public IDisposableReadOnlyCollection<OrtValue> Run(
            RunOptions runOptions, IReadOnlyCollection<string> inputNames, IReadOnlyCollection<OrtValue> inputValues,
            IReadOnlyCollection<string> outputNames)
        {
            if (inputNames.Count != inputValues.Count) throw new ArgumentException("the numbers of names and values differ");
            Write(model);
            Write(inputNames.Count);
            foreach (var feed in inputNames.Zip(inputValues, (name, value) => new { name, value }))
            {
                Write(feed.name);
                Write(feed.value.DType);
                Write(feed.value.Dims.Length);
                foreach (long size in feed.value.Dims) requests.Write(IPAddress.HostToNetworkOrder(size));
                Write(feed.value.Data.Length);
                requests.Write(feed.value.Data);
            }
            Write(outputNames.Count);
            foreach (string name in outputNames) Write(name);
            requests.Flush();
            if (ReadInt() != 0) throw new OnnxRuntimeException(ReadText());
            var results = new Values();
            for (int left = ReadInt(); left > 0; left--)
            {
                ReadText();
                string dtype = ReadText();
                long[] shape = Enumerable.Range(0, ReadInt()).Select(_ => IPAddress.NetworkToHostOrder(answers.ReadInt64())).ToArray();
                results.Add(new OrtValue(dtype, shape, answers.ReadBytes(ReadInt())));
            }
            return results;
        }

        void Write(int number)
        {
            requests.Write(IPAddress.HostToNetworkOrder(number));
        }

        void Write(string text)
        {
            byte[] bytes = Encoding.UTF8.GetBytes(text);
            Write(bytes.Length);
            requests.Write(bytes);
        }

        int ReadInt()
        {
            return IPAddress.NetworkToHostOrder(answers.ReadInt32());
        }

        string ReadText()
        {
            return Encoding.UTF8.GetString(answers.ReadBytes(ReadInt()));
        }

        public void Dispose() { }
    }
}
